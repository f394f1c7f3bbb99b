"""Step: one call of `apply_gradients`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np

from gpuopt.backends import gpu_backends, profiling_range
from gpuopt.locks import call_locked
from gpuopt.state.state import State
from gpuopt.step.row_checks import RowChecks
from gpuopt.step.updates import Updates
from gpuopt.variables import recording
from gpuopt.variables.gate import writing
from gpuopt.variables.variable import Variable, as_variable

# Of the names of variables that an error tells.
_MOST_NAMES = 8
_nothing = nullcontext()


class ThisThread(threading.local):
    """What `_prepare` leaves for the step of this thread: another may be in another step.

    Attributes:
        hyperparameters: Their values, by name.
    """

    hyperparameters: Mapping[str, np.floating[Any]] = {}


class SteppingOptimizer(Protocol):
    """What a step asks of its optimizer."""

    state: State
    row_checks: RowChecks
    this_thread: ThisThread
    runs_user_code: bool
    _use_locking: bool

    def _prepare(self) -> None: ...

    def _finish(self, update_ops: list[Any], name_scope: str) -> Any: ...


class Step:
    """One call of `apply_gradients`: what is updated, by which numbers, and what takes it back.

    User code may run inside: functions that give hyperparameters, a subclass's hooks, constraints.
    What it does to the optimizer, as a step of its own, does not change this step.

    Attributes:
        name: What profilers and `_finish` are told.
        counter: The variable that counts steps, or None.
    """

    def __init__(self, optimizer: SteppingOptimizer, global_step: Any, name: str) -> None:
        """Learns of late errors of earlier steps, and checks `global_step`.

        Raises:
            IndexError: an earlier step was given a row that its variable lacks.
            TypeError, ValueError: `global_step` cannot count.
        """
        if optimizer.row_checks.calls:
            optimizer.row_checks.raise_late(wait=False)
        self.name = name
        self.counter = None if global_step is None else checked_global_step(global_step)
        self._optimizer = optimizer
        self._update_ops: list[Any] = []
        self._is_prepared = False
        self._hyperparameters: Mapping[str, np.floating[Any]] = {}

    def run(self, updates: Updates) -> None:
        """Does the whole step: the updates, `_finish`, the count."""
        updates.refuse_shared_memory(self.counter)
        self._prepare(updates)
        with profiling_range(self.name) if gpu_backends else _nothing, writing():
            checks = self._optimizer.row_checks
            if not checks.calls and not updates.has_rows_on_a_gpu:
                self._apply(updates)
                self._finish()
                return
            with checks.around(updates.sparse_pairs(), self._undoing, updates.must_check_first):
                self._apply(updates)
                self._finish()

    def run_in_parts(self, compute: Callable[[Callable[[Updates], None]], None]) -> None:
        """Does a step in parts; the count comes at its end.

        Args:
            compute: Is given a function that applies some updates at once. Later gradients may
                depend on them, so they are not taken back when a GPU refuses rows: these are
                checked first.
        """

        def apply(updates: Updates) -> None:
            updates.refuse_shared_memory(self.counter)
            self._prepare(updates)
            with self._optimizer.row_checks.around(
                updates.sparse_pairs(), lambda: _do_nothing, lambda: True
            ):
                self._apply(updates)

        with profiling_range(self.name), writing():
            compute(apply)
            self._finish()

    def _prepare(self, updates: Updates) -> None:
        """Makes missing slots, and fixes the numbers of this step."""
        optimizer = self._optimizer
        updates.create_slots()
        if not self._is_prepared:
            optimizer._prepare()
            self._hyperparameters = optimizer.this_thread.hyperparameters
            self._is_prepared = True
        else:  # user code of this step's earlier parts may have made other steps
            optimizer.this_thread.hyperparameters = self._hyperparameters
        if optimizer.runs_user_code:
            updates.check_again()

    def _apply(self, updates: Updates) -> None:
        if recording.this_thread.recorders:  # a step inside a loss
            recording.before_write(variable for _, variable in updates.pairs())
        try:
            if not self._optimizer._use_locking:
                self._update_ops += updates.apply()
                return
            # In one order everywhere, so that two threads cannot wait for each other.
            locks = [identity.lock for identity in sorted(updates.identities(), key=id)]
            self._update_ops += call_locked(locks, updates.apply)
        except BaseException as error:
            _note_what_is_written(error, updates, self.name, self.counter)
            raise

    def _finish(self) -> None:
        optimizer = self._optimizer
        # A constraint may have made another step.
        optimizer.this_thread.hyperparameters = self._hyperparameters
        optimizer._finish(self._update_ops, self.name)
        if self.counter is not None:
            self.counter.assign_add(1, use_locking=optimizer._use_locking)

    def _undoing(self) -> Callable[[], None]:
        """Returns what takes back the host's part of this step, which has not begun."""
        kept = [(scalar, scalar.numpy()) for scalar in self._optimizer.state.host_scalars()]

        def undo() -> None:
            for scalar, value in kept:
                scalar.assign(value)
            if self.counter is not None:
                self.counter.assign_sub(1)

        return undo


def checked_global_step(global_step: Any) -> Variable:
    """Returns the variable that counts steps, or raises TypeError or ValueError."""
    try:
        step = as_variable(global_step)
    except (TypeError, ValueError) as error:
        raise type(error)(f"global_step: {error}") from error
    if step.shape != () or step.dtype.kind not in "iuf":
        raise TypeError(
            f'global_step "{step.name}" must be a scalar number, got shape {step.shape} and dtype '
            f"{step.dtype}"
        )
    return step


def _note_what_is_written(
    error: BaseException, updates: Updates, name: str, counter: Variable | None
) -> None:
    written, unsure = updates.written()
    if not written and not unsure:
        return
    note = f'The step of "{name}" was not finished. Updated: {_listed(written)}.'
    if unsure:
        note += f" Updated, in part, or not at all: {_listed(unsure)}."
    if counter is not None:
        note += f' "{counter.name}" was not counted up.'
    error.add_note(note)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    listed = ", ".join(f'"{name}"' for name in names[:_MOST_NAMES]) or "no variable"
    return f"{listed} and {more} more" if more > 0 else listed


def _do_nothing() -> None:
    pass
