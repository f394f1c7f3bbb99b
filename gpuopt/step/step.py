"""Step: one call of `apply_gradients`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from threading import get_ident
from time import perf_counter
from typing import Any, Protocol
from weakref import ProxyTypes, proxy, ref

import numpy as np

from gpuopt.backends import gpu_backends, launch_observer, profiling_range
from gpuopt.backends.backend import Scalars
from gpuopt.device import Device
from gpuopt.interrupts import SMALL_WRITE, interrupts_put_off
from gpuopt.locks import Lock, call_locked
from gpuopt.state import masters
from gpuopt.state.counts import StepCount, numbers_of, separate_counts
from gpuopt.state.state import State
from gpuopt.step import tables_behind
from gpuopt.step.additions import Addition, Forget
from gpuopt.step.hooks import is_undoable
from gpuopt.step.ledger import CLEAR, Ledger, Undo
from gpuopt.step.options import Options
from gpuopt.step.pairs import HOW_TO_PASS, raise_naming
from gpuopt.step.report import Report
from gpuopt.step.request import Listed
from gpuopt.step.updates import Updates
from gpuopt.step.user_code import call_user_code, refuse_in_a_step
from gpuopt.variables import gate, recording
from gpuopt.variables.behind import counting
from gpuopt.variables.gate import writing
from gpuopt.variables.operators import reading
from gpuopt.variables.row_changes import changes, refuse_changed
from gpuopt.variables.unfinished import Touched, begun, note_unfinished, refuse_unfinished
from gpuopt.variables.variable import Variable, as_variable

# The most names of variables that an error lists.
_MOST_NAMES = 8
_nothing = nullcontext()


class ThisThread(threading.local):
    """The numbers of this thread's step: another thread may be in another step.

    Attributes:
        hyperparameters: What `_prepare` leaves, by name; while a group of variables is computed,
            the group's.
        group: Which one, from 1 on; 0 for variables in no group.
        of_no_group: The hyperparameters of variables in no group, while a group is computed.
        of_groups: Those that each group has of its own.
        scalars: What rules are given, by the type that they compute in: for variables in no group,
            and then for each group.
        global_step: The variable that counts steps, before it is counted up; None if there is none.
        decaying: Of the running step, for hooks: see `StepRequest`.
        counted: The counts of the step's variables: see `gpuopt.state.counts`.
        count: That of the variables whose scalars are being computed; None for all others.
    """

    def __init__(self) -> None:
        self.hyperparameters: Mapping[str, np.floating[Any]] = {}
        self.group = 0
        self.of_no_group: Mapping[str, np.floating[Any]] = {}
        self.of_groups: Sequence[Mapping[str, np.floating[Any]]] = ()
        self.scalars: dict[type[np.floating[Any]], Any] = {}
        self.global_step: Variable | None = None
        self.decaying: Listed = None
        self.counted: Sequence[StepCount] = ()
        self.count: StepCount | None = None


class SteppingOptimizer(Protocol):
    """The part of an optimizer that a step uses."""

    state: State
    ledger: Ledger
    this_thread: ThisThread
    open_report: Report | None
    options: Options
    own_counts: Mapping[str, np.generic]
    _use_locking: bool

    def get_name(self) -> str: ...

    def _prepare(self) -> None: ...

    def _scalars_for(self, real: type[np.floating[Any]]) -> Sequence[Scalars]: ...

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any: ...


class Step:
    """One call of `apply_gradients`: the updates, the hyperparameters' values, and the undoing.

    User code may run inside: functions that give hyperparameters, a subclass's hooks, constraints.
    If that code makes a step of the same optimizer, this does not change the outer step.

    Attributes:
        name: The step's name in profilers, and the `name_scope` of `_finish`.
        thread: See `BegunStep`.
        calls_user_code: See there.
        counter: The variable that counts steps, or None.
        observed: The context that `apply_gradients` enters once.
    """

    # Here, because setting each in `__init__` takes time.
    calls_user_code = False
    observed: AbstractContextManager[None] = _nothing
    # What is being written.
    _writing: Updates | None = None
    # The numbers that the step changes in host memory, as they were, while it changes them.
    _before_count: list[tuple[Variable, Any]] | None = None
    _finish_has_begun = False
    # How many of the additions have written what follows the updates.
    _num_followed = 0
    _was_decided_by_gpu = False
    _is_counted = False
    _began = 0.0
    # Of a step that was not finished.
    _counted: Sequence[StepCount] = ()
    _touched: Touched | None = None
    _weak_counter: Callable[[], Variable | None] = staticmethod(lambda: None)
    _weak_before_count: Sequence[tuple[ref[Variable], Any]] = ()

    def __init__(self, optimizer: SteppingOptimizer, global_step: Any, name: str) -> None:
        """Raises late errors of earlier steps, and checks `global_step`.

        Raises:
            RuntimeError: a GPU's current stream is being captured into a CUDA graph; or a signal
                handler has come in the middle of a step.
            IndexError: an earlier step was given a row that its variable lacks.
            TypeError, ValueError: `global_step` cannot count.
        """
        for backend in gpu_backends:
            backend.refuse_capture()
        if begun or gate.last_closing.lock.locked():
            refuse_in_a_step()
        if optimizer.ledger.books is not CLEAR:
            optimizer.ledger.raise_late(wait=False)
        self.name = name
        self.counter = None if global_step is None else checked_global_step(global_step)
        self.thread = get_ident()
        self._optimizer = optimizer
        self._written: list[Variable] = []  # in earlier parts
        self._row_change = changes.number
        self._update_ops: list[Any] = []
        self._counters_to_undo = [] if self.counter is None else [self.counter]
        self._additions: list[Addition] = []
        self._forget_additions: list[Forget] = []
        # From here on, as another thread may open or end one in the step's middle.
        self._report = optimizer.open_report
        # Inside, an open report is told of what this thread launches, checks of gradients too.
        if self._report is not None:
            self._began = perf_counter()
            self.observed = launch_observer.observed_by(self._report)
        # One of the step that this is inside of:
        elif isinstance(launch_observer.this_thread.observer, Report):
            self.observed = launch_observer.observed_by(None)

    def run(self, updates: Updates, *added: Addition) -> None:
        """Does the whole step: the updates, `_finish`, the count, and what wrappers add.

        Args:
            updates: All of the step's.
            added: What the optimizer itself adds, and then wrappers, from the inside out.
        """
        updates.refuse_shared_memory(self.counter)
        if begun:
            self._refuse_unfinished(updates)
        is_large = updates.num_elements > SMALL_WRITE
        later = interrupts_put_off(waits_for_begin=True) if is_large else None
        this_thread = self._optimizer.this_thread
        outer = vars(this_thread).copy()
        report = self._report
        as_step = gpu_backends[0].profiling_range(self.name) if gpu_backends else _nothing
        with (
            later or _nothing,
            as_step if report is None else report.observe_step(self.name, self._began),
            writing(),
        ):
            if changes.number != self._row_change:
                refuse_changed(updates.variables(), self._row_change)
            # Before it reads what other steps and restores write: from here on, none comes between.
            begun[self] = None
            try:
                try:
                    if not updates.is_planned:
                        self._separate_counts(updates)
                        updates.create_slots()
                    if updates.request.decides is None:
                        self._prepare()
                        updates.fix_scalars()
                    else:
                        updates.request.decides.fix_scalars(self._prepare, updates)
                    updates.check()
                    if added:
                        updates = self._prepare_additions(added, updates)
                except BaseException:
                    self._forget(updates)
                    raise
                if later is not None:
                    later.begin()
                may_be_refused = updates.gpu_decides is not None or updates.has_rows_on_a_gpu
                if may_be_refused or self._optimizer.ledger.flags:
                    self._check_and_call(self._write, updates)
                else:
                    self._write(updates)
            finally:
                vars(this_thread).update(outer)
                if self in begun:
                    note_unfinished(self)

    def run_in_parts(self, compute: Callable[[Callable[[Updates], None]], None]) -> None:
        """Does a step in parts; the count comes at its end.

        Args:
            compute: Called with a function that applies some updates at once. Later gradients may
                depend on them, so they cannot be undone later: it waits until GPUs have checked
                their rows.
        """
        is_prepared = False
        counted: dict[StepCount, None] = {}
        written: list[str] = []
        unsure: list[str] = []
        num_elements = 0
        report, later = self._report, interrupts_put_off(waits_for_begin=True)

        def apply_checked(updates: Updates) -> None:
            nonlocal unsure, num_elements
            num_elements += updates.num_elements
            if num_elements > SMALL_WRITE:
                later.begin()
            self._writing = updates
            try:
                if updates.clips is not None:
                    with reading(*updates.read):
                        updates.measure()
                self._update_and_follow(updates)
                self._written += updates.variables()
                self._writing = None
                if report is not None:
                    report.note_updates(updates)
            finally:
                names, unsure = updates.written()
                written.extend(names)

        def apply(updates: Updates) -> None:
            nonlocal is_prepared
            updates.refuse_shared_memory(self.counter)
            if begun:
                self._refuse_unfinished(updates)
            self._separate_counts(updates)
            updates.create_slots(of_part=True)
            if not is_prepared:
                begun[self] = None  # see `run`
                self._prepare()
                # Of any later part, too: by then, user code may have made other steps.
                for real in (np.float32, np.float64):
                    self._optimizer._scalars_for(real)
                is_prepared = True
            updates.fix_scalars()
            updates.check()
            counted.update(dict.fromkeys(this_thread.counted))
            self._check_and_call(apply_checked, updates, is_part=True)

        this_thread = self._optimizer.this_thread
        outer = vars(this_thread).copy()
        as_step = profiling_range(self.name)
        with (
            later,
            as_step if report is None else report.observe_step(self.name, self._began),
            writing(),
        ):
            try:
                compute(apply)
                this_thread.counted = list(counted)
                self._count_alone()
                begun.pop(self, None)
            except BaseException as error:
                this_thread.counted = list(counted)
                self._note(error, written, unsure)
                if self in begun:
                    note_unfinished(self)
                raise
            finally:
                vars(this_thread).update(outer)

    def _separate_counts(self, updates: Updates) -> None:
        optimizer = self._optimizer
        if optimizer.own_counts:
            separate_counts(optimizer.state, updates.variables(), optimizer.ledger.settle)

    def _prepare(self) -> None:
        """Fixes the numbers of this step; steps that user code makes inside have their own."""
        # Attributes of what threads have apart take several times as long.
        this_thread = vars(self._optimizer.this_thread)
        this_thread["scalars"], this_thread["global_step"] = {}, self.counter
        this_thread["counted"] = ()
        prepare = self._optimizer._prepare
        if (prepare.__module__ or "").startswith("gpuopt."):  # None of code that `exec` runs
            prepare()
        else:
            call_user_code(prepare)

    def _prepare_additions(self, added: Sequence[Addition], updates: Updates) -> Updates:
        self._additions = list(added)
        for addition in self._additions:
            updates, forget = addition._prepare_updates(self._optimizer, updates)
            self._forget_additions.append(forget)
        return updates

    def _check_and_call(
        self, write: Callable[[Updates], None], updates: Updates, is_part: bool = False
    ) -> None:
        """Has GPUs check the rows of `updates`, and calls `write` with them."""
        ledger = self._optimizer.ledger
        was_called = is_written = False

        def call() -> None:
            nonlocal was_called, is_written
            was_called = True
            write(updates)
            is_written = True

        try:
            if is_part or updates.must_check_first():
                ledger.check_first(updates.sparse_pairs())
                call()
            else:
                locks = self._locks(updates) if self._optimizer._use_locking else []
                ledger.call(call, updates, self._undoing(updates), locks)
        except BaseException as error:
            if not was_called:
                self._forget(updates)
            if is_written and not isinstance(error, IndexError | FloatingPointError):
                error.add_note(f'The step of "{self.name}" was finished before.')
            raise

    def _locks(self, updates: Updates) -> list[Lock]:
        written = [*updates.identities(), *(each.identity for each in self._counters())]
        return [identity.lock for identity in written]

    # The passes of a step.

    def _write(self, updates: Updates) -> None:
        """Makes the step in five passes: measure, decide, update, follow, count.

        Most steps need two of them. Additions write before the update and after the count.
        """
        ledger = self._optimizer.ledger
        missing: list[str] = []
        if self._additions or updates.clips is not None:
            if not self._measure_and_decide(updates):
                return
            missing = [each._what_is_added for each in self._additions if each._what_is_added]
        self._writing = updates
        try:
            for addition in self._additions:
                addition._before_update(updates, ledger)
            self._update_and_follow(updates)
            if updates.gpu_decides is None:
                (self._count_alone if gpu_backends else self._count)()
            else:
                updates.gpu_decides.promise(updates)
                self._is_counted = True
            for addition in self._additions:
                addition._after_update(updates, ledger)
                self._num_followed += 1
                if addition._what_is_added:
                    missing.remove(addition._what_is_added)
            del begun[self]
        except BaseException as error:
            self._note(error, *updates.written(), missing)
            raise
        if self._report is not None:
            self._report.note_updates(updates)

    def _measure_and_decide(self, updates: Updates) -> bool:
        """Has devices measure gradients; a GPU may decide by that, or the host asks all additions.

        Returns:
            False if the step is left out, or is refused by the host: what was made for it is taken
            back.
        """
        is_made = keeps_new_slots = False
        try:
            if tables_behind.members_of_tables:  # variables may be measured, too
                tables_behind.bring_up_written(updates, self._optimizer.state)
            with reading(*updates.read) if updates.read else _nothing:
                if updates.clips is not None:
                    updates.measure()
                for addition in self._additions:
                    if not addition._makes_step(updates):
                        keeps_new_slots = addition._keeps_new_slots
                        return False
            is_made = True
        finally:
            if not is_made:
                self._counters_to_undo.clear()
                if not keeps_new_slots:
                    self._forget(updates)
        return True

    def _update_and_follow(self, updates: Updates) -> None:
        """Updates variables, by what was measured and decided, and what follows them."""
        if tables_behind.members_of_tables:  # else a call less in each step
            tables_behind.bring_up_written(updates, self._optimizer.state)
        if recording.this_thread.recorders:  # a step inside a loss
            recording.before_write(updates.variables())
        write = updates.update
        if updates.read or updates.is_followed:
            write = partial(_update_then_follow, updates)
        if masters.owners:
            write = masters.with_copies(self._optimizer.state, list(updates.identities()), write)
        if not self._optimizer._use_locking:
            self._update_ops += write()
            return
        # In one order everywhere, so that two threads cannot wait for each other.
        locks = [identity.lock for identity in sorted(updates.identities(), key=id)]
        self._update_ops += call_locked(locks, write)

    def _count_alone(self) -> None:
        """Counts with no other thread in between."""
        optimizer, counter = self._optimizer, self.counter
        if not is_undoable(optimizer._finish):  # a user's may make steps
            self._count()
            return
        lock = counter.identity.lock if counter is not None and optimizer._use_locking else _nothing
        with lock, counting:  # in the order in which an assignment with `use_locking` takes them
            self._count()

    def _count(self) -> None:
        """Changes powers and counts; again, if an interrupted call was undone."""
        optimizer, counter = self._optimizer, self.counter
        counted = optimizer.this_thread.counted
        own = numbers_of(counted) if counted else ()
        self._before_count = before = optimizer.state.copy_host_scalars(own)
        if counter is not None and counter.memory.kind == "cpu":
            counter.bring_up()  # another optimizer's steps may count by it, too
            before.append((counter, counter._array.item()))
        for option in optimizer.options.stages:
            option.count(optimizer.state)
        if not self._finish_has_begun or is_undoable(optimizer._finish):
            self._finish_has_begun = True
            optimizer._finish(self._update_ops, self.name)
        if counter is not None:
            counter.count_up(optimizer._use_locking)
        self._is_counted, self._before_count = True, None

    # What is asked for if it was not finished: see `BegunStep`.

    @property
    def admits_steps(self) -> bool:
        is_finishing = self._before_count is not None
        return self.calls_user_code or (
            is_finishing and not is_undoable(self._optimizer._finish)  # it is a user's
        )

    @property
    def unfinished_name(self) -> str:
        return self._optimizer.get_name()

    @property
    def unfinished_state(self) -> State | None:
        try:
            return self._optimizer.state
        except ReferenceError:  # see `let_go`
            return None

    def touched(self) -> Touched | None:
        if self._touched is not None:
            return self._touched
        updates, variables = self._writing, list(self._written)
        if updates is not None:
            self._was_decided_by_gpu = updates.gpu_decides is not None
            if self._num_followed or any(map(any, updates.written())) or self._adds_before():
                variables += updates.variables()
        if not variables:
            return None
        optimizer = self._optimizer
        if masters.owners:
            masters.make_equal(optimizer.state, [each.identity for each in variables])
        slots = chain.from_iterable(map(optimizer.state.slots_of, variables))
        beside = chain.from_iterable(each._written_beside(variables) for each in self._additions)
        arrays = [*variables, *slots, *_averages_of(optimizer, variables), *beside]
        numbers = [*optimizer.state.others().values(), *self._counters()]
        self._touched = Touched(
            [each.identity for each in arrays], [each.identity for each in numbers]
        )
        return self._touched

    def let_go(self) -> None:
        self._writing, self._written, self._update_ops = None, [], []
        self._report, self.observed = None, _nothing
        self._counters_to_undo = []
        self._forget_additions.clear()
        if self.counter is not None:
            self._weak_counter = ref(self.counter)
            self.counter = None
        if self._before_count is not None:
            self._weak_before_count = [(ref(number), value) for number, value in self._before_count]
            self._before_count = None
        if not isinstance(self._optimizer, ProxyTypes):
            # The state has them from now on: what is remembered keeps no optimizer alive.
            self._optimizer.state.unfinished.setdefault(self, self._additions)
            self._additions = []
            self._optimizer = proxy(self._optimizer)

    def accept(self) -> None:
        this_thread = self._optimizer.this_thread
        outer = vars(this_thread).copy()
        additions = self._optimizer.state.unfinished[self]
        with writing():
            if self._was_decided_by_gpu:
                for each in additions:
                    each._accept_decided(self._is_counted)
            else:
                for number, value in self._weak_before_count:
                    living = number()
                    if living is not None:
                        living.assign(value)
            if self._is_counted:
                return
            try:
                self.counter = self._weak_counter()
                self._prepare()
                this_thread.counted = self._counted
                self._count_alone()
            finally:
                vars(this_thread).update(outer)
                self.let_go()

    def _counters(self) -> list[Variable]:
        return [] if self.counter is None else [self.counter]

    def _adds_before(self) -> bool:
        return any(each._what_is_added for each in self._additions)

    def _refuse_unfinished(self, updates: Updates) -> None:
        """Raises RuntimeError if another step was not finished that touched the same."""
        optimizer, variables = self._optimizer, updates.variables()
        slots = chain.from_iterable(map(optimizer.state.slots_of, variables))
        numbers = [*optimizer.state.others().values(), *self._counters()]
        touched = [*variables, *slots, *_averages_of(optimizer, variables), *numbers]
        refuse_unfinished("updated", [each.identity for each in touched], optimizer.state)

    def _note(
        self,
        error: BaseException,
        written: list[str],
        unsure: list[str],
        missing: Sequence[str] = (),
    ) -> None:
        """Has an error say which variables were updated, and what may be half done."""
        self._counted = self._optimizer.this_thread.counted
        if not written and not unsure and not missing:
            return
        note = f'The step of "{self.name}" was not finished. Updated: {_listed(written)}.'
        if unsure:
            note += f" Updated, in part, or not at all: {_listed(unsure)}."
        if missing:
            note += f" Done, in part, or not at all: {', '.join(missing)}."
        if self.counter is not None and not self._is_counted:
            note += f' "{self.counter.name}" was not counted up.'
        error.add_note(note)

    def _forget(self, updates: Updates) -> None:
        """Takes back what was made for a step that was refused before anything was written."""
        self._optimizer.state.forget(updates.created)
        for forget in (*updates.forgets, *self._forget_additions):
            forget(None)

    def _undoing(self, updates: Updates) -> Undo:
        """Called before the step: returns what undoes the host's part of it."""
        state, host_counts = self._optimizer.state, updates.gpu_decides is None
        of_variables = self._optimizer.this_thread.counted
        own = numbers_of(of_variables) if of_variables else ()
        kept = state.copy_host_scalars(own) if host_counts else []
        # What is undone lives until the GPU has checked the rows: not so the step's gradients.
        created, forgets = updates.created, [*updates.forgets, *self._forget_additions]
        counted = self._counters_to_undo if host_counts else []

        def undo(refused: Collection[Device]) -> None:  # again, if it was interrupted
            for scalar, value in kept:
                scalar.assign(value)
            for counter in counted:
                counter.count_down(counted.clear)
            state.forget(created, refused)
            for forget in forgets:
                forget(refused)

        return Undo(undo, [*[scalar for scalar, _ in kept], *counted])


def _averages_of(optimizer: SteppingOptimizer, variables: Sequence[Variable]) -> list[Variable]:
    """Lists the averages that steps move with some variables, as far as they are made."""
    averages = optimizer.options.averages
    return [] if averages is None else averages.of(variables)


def _update_then_follow(updates: Updates) -> list[Any]:
    with reading(*updates.read) if updates.read else _nothing:
        update_ops = updates.update()
        if updates.is_followed:
            updates.follow()
        return update_ops


def checked_global_step(global_step: Any) -> Variable:
    """Returns the variable that counts steps, or raises TypeError or ValueError."""
    if type(global_step) in (list, tuple, dict):
        raise TypeError(
            f"global_step must be a scalar that counts steps, got {type(global_step).__name__}; "
            f"{HOW_TO_PASS}"
        )
    try:
        step = as_variable(global_step)
    except (TypeError, ValueError) as error:
        raise_naming("global_step", error)
    if step.shape != () or step.dtype.kind not in "iuf":
        raise TypeError(
            f'global_step "{step.name}" must be a scalar number, got shape {step.shape} and dtype '
            f"{step.dtype}"
        )
    return step


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(f'"{name}"' for name in names[:_MOST_NAMES]) or "no variable"
    return f"{listed} and {more} more" if more > 0 else listed
