"""Calls that GPUs may still refuse or skip, while the host goes on, and their late errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from threading import get_ident
from typing import Any, NamedTuple

from gpuopt import environment
from gpuopt.backends import backend_for, gpu_backends, to_device
from gpuopt.backends.backend import FlagRead, RowCheck, RowFlags, Updated
from gpuopt.backends.record import StepRecord
from gpuopt.device import Device
from gpuopt.locks import Lock, call_locked
from gpuopt.step.chain import Chain, Outcome
from gpuopt.step.pairs import Gradient
from gpuopt.step.updates import Updates
from gpuopt.variables.behind import counting, own_numbers
from gpuopt.variables.gate import undoing
from gpuopt.variables.identity import Identity
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.late_errors import check_for_late_errors, register
from gpuopt.variables.variable import Variable

# The most calls that are enqueued before the host waits: each takes a little page-locked memory.
_MOST_CALLS = 64
# The most with an unknown decision, including the new one: kernels get scalars for each count.
_MOST_DECIDED = 8


# The variables with sparse gradients on GPUs, and their rows.
Checks = Sequence[tuple[Variable, RowCheck]]


class Undo(NamedTuple):
    """What undoes the host's part of a call.

    Attributes:
        put_back: Called with the devices that have refused the call.
        numbers: The variables whose values or counts it takes back.
    """

    put_back: Callable[[Collection[Device]], None]
    numbers: Sequence[Variable] = ()


class Promise(NamedTuple):
    """A call that was enqueued, and that a GPU may turn out to have refused or skipped.

    Attributes:
        devices: Those whose flags show whether the call was refused.
        flags: Their flags on their way to the host.
        described: (identity, height, device) of the variables with sparse gradients, by number.
        outcome: A GPU's decision about the step; None if the host has counted it.
        undo: Undoes what the call has left outside of the devices that have refused it.
    """

    devices: Collection[Device]
    flags: dict[Device, FlagRead]
    described: Mapping[int, tuple[Identity, int, Device]]
    outcome: Outcome | None
    undo: Undo

    def is_refused(self, chain: Chain | None) -> bool | None:
        """Whether a GPU has refused the call; None if none has so far, and one may."""
        has_arrived = len(self.flags) == len(self.devices)
        for read in self.flags.values():
            if not read.is_done:
                has_arrived = False
            elif read.values[0]:
                return True
        if self.outcome is not None:
            if not self.outcome.read.is_done:
                has_arrived = False
            elif chain is not None and chain.policy.refuses and self.outcome.nonfinite is not None:
                return True
        return False if has_arrived else None

    def bad_rows(self) -> dict[Device, FlagRead]:
        """Returns the flags that have arrived and are set."""
        return {at: read for at, read in self.flags.items() if read.is_done and read.values[0]}


class Books(NamedTuple):
    """The outstanding promises of one optimizer. Immutable: Ctrl-C leaves the old or the new ones.

    Attributes:
        promises: The oldest first.
        chain: The steps that a GPU decides about; None if the host knows all numbers.
        error: An error that a GPU has found and that was not raised yet.
    """

    promises: Sequence[Promise] = ()
    chain: Chain | None = None
    error: Exception | None = None


CLEAR = Books()


class Ledger:
    """The promises of one optimizer; a `RowsBehind` of the numbers that its steps change.

    A call is a promise from its first launch until its result has reached the host. A GPU refuses
    a call with a row out of range or, if that is an error, with a gradient that is not finite. No
    GPU then writes anything for it or for later calls until the host has settled. The host undoes
    its part of these calls and raises the first one's error.

    The host counts a call at once, unless a GPU decides about the step. Then a read or write of a
    number that steps change, or of the loss scale, waits for the GPU: see `DeviceScaling`.

    Attributes:
        books: What is outstanding; replaced as a whole, while `counting` is held.
        flags: By device; made at the first call that may be refused there. A kernel checks all rows
            of a call before the first update, and sets the flag if one is out of range.
        settled: A step's own numbers while there is no chain: another empty mapping after each
            chain, so that a step notices that one has ended.
    """

    holds_arrays = False

    def __init__(self) -> None:
        self.books = CLEAR
        self.flags: dict[Device, Updated] = {}
        self.settled: Mapping[Identity, Any] = {}
        # The thread in the middle of a call, whose kernels must look at the flags, or of settling.
        self._thread: int | None = None
        # What the running call adds, if a GPU decides about it.
        self._decided: tuple[Chain, Outcome] | None = None
        # The last call, whose flags are not being read yet.
        self._unread: Promise | None = None
        self._unreported: deque[Callable[[], None]] = deque()
        register(self)

    @property
    def records(self) -> dict[Device, StepRecord]:
        """By device, records with the flags that this thread's kernels read before they write."""
        if self._thread != get_ident():
            return {}
        return {device: StepRecord(flag) for device, flag in self.flags.items()}

    def unless_refused(self, device: Device, new: Any, old: Any) -> Any:
        """Returns what to write beside this call's updates: `old` if `device` refuses its rows.

        Args:
            device: Where both are.
            new: An array.
            old: An array that can be broadcast to its shape.
        """
        record = self.records.get(device)
        if record is None:
            return new
        flag = record.refused
        with backend_for(device).enter_reading(flag, kept=(flag, new, old)):
            return _row_flags(device).unless_set(flag, new, old)

    def call(
        self,
        write: Callable[[], None],
        updates: Updates,
        undo: Undo,
        locks: Sequence[Lock] = (),
    ) -> None:
        """Calls `write`, after the checks of its rows have been enqueued.

        Args:
            write: Applies the updates; if a GPU decides about them, it calls `decide_by`.
            updates: Nothing of them is written while a flag is set.
            undo: Undoes what `write` does outside of GPUs.
            locks: Those that `write` takes.

        Raises:
            IndexError: a row is out of range and GPUOPT_CHECK is 1; or an earlier call's row is.
            FloatingPointError: likewise, of a step that is not finite, if that is an error.
            DeadlineExceededError: another thread is in the middle of a call, and does not end it.
        """
        checks = _checks_of(updates.sparse_pairs())
        is_unsure = bool(checks) or updates.gpu_decides is not None
        if is_unsure or self.books.promises:
            enqueue = partial(self._enqueue, checks, write, undo, updates)
            if locks:
                call_locked([*locks, counting], enqueue)
            else:
                with counting:
                    enqueue()
        else:
            write()
        if is_unsure and environment.settings().checks_at_once:
            self.raise_late(wait=True)

    def check_first(self, grads_and_vars: Sequence[tuple[Gradient, Variable]]) -> None:
        """Waits until GPUs have checked the rows of all calls, and of some gradients.

        Raises:
            IndexError: a row is out of range, of these gradients or of an earlier call.
            FloatingPointError: an earlier step was not finite, and that is an error.
        """
        checks = _checks_of(grads_and_vars)
        if checks:
            with counting:
                self._enqueue(checks, _nothing, _NOTHING_TO_UNDO)
        self.raise_late(wait=True)

    def decide_by(self, chain: Chain, outcome: Outcome) -> None:
        """Has the running call count when its decision has arrived.

        Args:
            chain: The chain after it.
            outcome: The decision.
        """
        self._decided = chain, outcome

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises what GPUs have found; see `LateErrors`. Does nothing in a call of this thread.

        Raises:
            IndexError: a row was out of range; its call and all later ones are undone.
            FloatingPointError: a step was not finite, and that is an error; likewise.
        """
        if self.books is CLEAR or self._thread == get_ident() or own_numbers.ledger is self:
            return
        self._take(device, wait=wait)
        if self.books.error is not None:
            self._raise_error()

    def may_take_back(self, number: object) -> bool:
        """See `LateErrors`."""
        # Not by a generator: Ctrl-C in one that `any` has left is lost.
        for promise in self.books.promises:
            for each in promise.undo.numbers:
                if each is number:
                    return True
        return False

    def settle(self) -> None:
        """Waits for all promises and assigns the numbers that steps change; raises late errors."""
        self._take()
        self._raise_error()

    def settle_locked(self) -> None:
        """Does so inside the gate and with `counting`; reports nothing yet, as that may be slow."""
        self._settle()
        self._raise_error()

    def bring_up(self, rows: Any = None) -> None:
        """Waits until the GPU has decided about all steps, and assigns the variables' values.

        Does nothing where a step of this thread reads numbers of its own.

        Raises:
            RuntimeError: this thread is in the middle of such a step, as in a signal handler.
        """
        if self.books.chain is None or own_numbers.ledger is self:
            return
        self._refuse_in_call()
        self._take()

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        """Settles even in a step of this thread: a write is not to the step's own numbers."""
        is_settling = own_numbers.ledger is self and not own_numbers.of  # in `Chain.assign`
        if self.books.chain is not None and not is_settling:
            self._refuse_in_call()
            with undoing(), counting:
                self._settle()
        return work

    def _refuse_in_call(self) -> None:
        if self._thread == get_ident():
            raise RuntimeError(
                "a number that counts steps cannot be read or assigned in the middle of a step "
                "that a GPU decides about, or of its count, as by a signal handler: let the "
                "handler set a flag, and do it after apply_gradients"
            )

    def _enqueue(
        self,
        checks: Checks,
        write: Callable[[], None],
        undo: Undo,
        updates: Updates | None = None,
    ) -> None:
        """Enqueues the checks of rows, calls `write`, and adds a promise, also if `write` fails."""
        decider = None if updates is None else updates.gpu_decides
        if self._unread is not None:
            self._read_flags(self._unread)
        try:
            self._thread = get_ident()
            devices = {variable.device for variable, _ in checks}
            if decider is not None:
                decider.begin(updates)
            else:  # a GPU that decides also joins what others refuse
                if self.books.chain is not None:
                    self.settle_locked()
                if updates is not None and len(gpu_backends) > 1:
                    devices.update(each for each in updates.devices() if each.kind == "gpu")
                devices.update(self.flags if self.books.promises else ())
            for device in devices:
                if device not in self.flags:
                    self.flags[device] = _row_flags(device).new()
            undo_call = _NOTHING_TO_UNDO
            try:
                for device in devices:
                    rows = [check for variable, check in checks if variable.device is device]
                    if rows:
                        _row_flags(device).check(self.flags[device], rows)
                if decider is None and len(devices) > 1:
                    self._join(sorted(devices, key=str))
                write()
                undo_call = undo
            finally:
                chain, outcome = self._decided or (self.books.chain, None)
                described = {n: (v.identity, height, v.device) for v, (n, _, height) in checks}
                # Set before the promise is listed: one without flags would count as good.
                self._unread = promise = Promise(devices, {}, described, outcome, undo_call)
                self.books = Books([*self.books.promises, promise], chain, self.books.error)
                self._decided = None
                self._read_flags(promise)
        finally:
            self._thread = None

    def _join(self, devices: Sequence[Device]) -> None:
        """Sets the flags of all devices if one is set."""
        home, others = devices[:1], devices[1:]
        for source, target in [*product(others, home), *product(home, others)]:
            flags, flag = _row_flags(source), self.flags[source]
            with backend_for(source).enter_reading(flag, kept=(flag,)):
                brought = to_device(flags.memory(flag), target)
            _row_flags(target).join(self.flags[target], brought)

    def _read_flags(self, promise: Promise) -> None:
        """Begins to read the last call's flags, unless that has been done.

        It may have failed, for lack of memory, or been interrupted. It must come before the next
        check, which sets the same flags.
        """
        for device in promise.devices:
            if device not in promise.flags:
                promise.flags[device] = _row_flags(device).read(self.flags[device])
        self._unread = None

    def _wait(self, device: Device | None = None, *, wait: bool) -> None:
        """Waits before locks are taken that other optimizers' steps need."""
        promises, chain = self.books.promises, self.books.chain
        most = _MOST_CALLS if chain is None else _MOST_DECIDED - 1
        for number, promise in enumerate(promises):
            is_too_old = number < len(promises) - most
            for place, read in list(promise.flags.items()):  # another thread may add one
                if is_too_old or (wait and device in (None, place)):
                    read.wait(f"{place}, which checks gradients")
            if promise.outcome is None or chain is None:
                continue
            if is_too_old or (wait and device in (None, *chain.devices)):
                promise.outcome.read.wait(f"{chain.scale.device}, which checks gradients")

    def _take(self, device: Device | None = None, *, wait: bool = True) -> None:
        """Settles inside the gate, and then reports: outside, because this calls loggers."""
        if wait or len(self.books.promises) >= _MOST_DECIDED:
            self._wait(device, wait=wait)
        check_for_late_errors(counting, partial(self._settle, device, wait=wait))
        while self._unreported:
            try:
                report = self._unreported.popleft()
            except IndexError:  # another thread reports it
                return
            report()

    def _settle(self, device: Device | None = None, *, wait: bool = True) -> None:
        """Takes what has arrived, the oldest first; the arguments are those of `raise_late`.

        Ends the chain if it has waited for that. It can be repeated if it is interrupted.
        """
        outer = self._thread
        try:
            self._thread = get_ident()
            if self._unread is not None:
                self._read_flags(self._unread)
            if wait or len(self.books.promises) >= _MOST_DECIDED:
                self._wait(device, wait=wait)
            are_kept = True
            for promise in self.books.promises:
                is_refused = promise.is_refused(self.books.chain)
                if is_refused:
                    self._refuse()
                    return
                are_kept = are_kept and is_refused is not None
                if are_kept:
                    self._keep(promise)
                elif not wait:
                    break
            chain = self.books.chain
            if wait and chain is not None and device in (None, *chain.devices):
                chain.assign(self)
                self._end(self.books.error)
        finally:
            self._thread = outer

    def _end(self, error: Exception | None) -> None:
        """Forgets all promises; the numbers that steps change are the variables' again."""
        chain, self.settled = self.books.chain, {}
        self._replace((), None, error)
        for each in () if chain is None else chain.variables():
            if each.identity.behind is self:
                each.identity.behind = None

    def _replace(
        self, promises: Sequence[Promise], chain: Chain | None, error: Exception | None
    ) -> None:
        is_clear = not promises and chain is None and error is None
        self.books = CLEAR if is_clear else Books(promises, chain, error)

    def _keep(self, promise: Promise) -> None:
        """Counts the oldest call, and forgets it."""
        books, outcome = self.books, promise.outcome
        chain = books.chain
        if outcome is not None and chain is not None:
            self._note(outcome, chain)
            chain = chain.after(outcome)
        self._replace(books.promises[1:], chain, books.error)

    def _note(self, outcome: Outcome, chain: Chain) -> None:
        """Notes a step that was not finite; can be repeated if interrupted."""
        found, policy = outcome.nonfinite, chain.policy
        if found is not None:
            policy.last_nonfinite = found
            if policy.report is not None:
                self._unreported.append(partial(policy.report, found))

    def _refuse(self) -> None:
        """Undoes the first call that a GPU has refused, and all since, which were not written."""
        self._wait(wait=True)
        while not self.books.promises[0].is_refused(self.books.chain):
            self._keep(self.books.promises[0])
        promises, chain = self.books.promises, self.books.chain
        first, num_later = promises[0], len(promises) - 1
        error: Exception | None = _rows_error(first, num_later)
        if chain is not None:
            if error is None and first.outcome is not None:
                self._note(first.outcome, chain)
                error = _nonfinite_error(first.outcome, chain.scale.device, num_later)
            for promise in promises:
                if promise.outcome is not None:
                    chain = chain.after(promise.outcome)
            chain.assign(self)
        refused = {place for promise in promises for place in promise.bad_rows()}
        for place in refused:
            _row_flags(place).clear(self.flags[place])
        for promise in reversed(promises):
            promise.undo.put_back(refused)
        self._end(error)

    def _raise_error(self) -> None:
        if self.books.error is not None:
            try:
                raise self.books.error
            finally:  # not before: Ctrl-C in between would lose it
                self._replace(self.books.promises, self.books.chain, None)


def _checks_of(grads_and_vars: Sequence[tuple[Gradient, Variable]]) -> Checks:
    return [
        (variable, RowCheck(number, gradient.indices, variable.shape[0]))
        for number, (gradient, variable) in enumerate(grads_and_vars)
        if isinstance(gradient, IndexedSlices) and variable.device.kind == "gpu"
    ]


def _rows_error(promise: Promise, num_later: int) -> IndexError | None:
    """Returns the error of a row that is out of range; None if there is none."""
    bad = promise.bad_rows()
    if not bad:
        return None
    read = next(iter(bad.values()))
    number, row = int(read.values[0]) - 1, int(read.values.view("int64")[1])
    identity, height, device = promise.described[number]
    since = f", nor did the {num_later} calls since" if num_later else ""
    return IndexError(
        f'gradient for "{identity.name}": row {row} is not in [0, {height}), the variable\'s rows. '
        f"{device} found this after the call, which changed nothing on any GPU{since}"
    )


def _nonfinite_error(outcome: Outcome, device: Device, num_later: int) -> FloatingPointError:
    since = f", nor by the {num_later} calls since" if num_later else ""
    return FloatingPointError(
        f"{outcome.nonfinite}; {device} found this after the call: nothing was changed by it{since}"
    )


def _row_flags(device: Device) -> RowFlags:
    flags = backend_for(device).row_flags
    assert flags is not None
    return flags


def _nothing() -> None:
    pass


_NOTHING_TO_UNDO = Undo(lambda refused: None)
