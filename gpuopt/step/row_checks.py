"""GPUs check rows of sparse gradients while the host goes on; a call with a bad row is undone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from gpuopt import environment
from gpuopt.backends import backend_for
from gpuopt.backends.backend import FlagRead, RowCheck, RowFlag, RowFlags
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.late_errors import check_for_late_errors, register
from gpuopt.variables.variable import Variable

# Undoes a call, given the devices that have refused it.
Undo = Callable[[Collection[Device]], None]

# Calls that the host may be ahead of its checks: each takes a little page-locked memory.
_MOST_CALLS = 64


class _Check(NamedTuple):
    """The rows of one gradient, which a GPU must check.

    Attributes:
        number: Identifies the variable to the reader of the flag.
    """

    number: int
    rows: Any
    variable: Variable


class _Call(NamedTuple):
    """A call whose rows the host does not know to be in range yet.

    Attributes:
        devices: Those that got sparse gradients.
        reads: Their flags on their way to the host.
        described: (name, height) of the variables with sparse gradients, by number.
        undo: Undoes what the call has left outside of the devices that have refused it.
    """

    devices: Collection[Device]
    reads: dict[Device, FlagRead]
    described: Mapping[int, tuple[str, int]]
    undo: Undo


class RowChecks:
    """The checks of one optimizer.

    Attributes:
        calls: The calls whose rows the host does not know to be in range yet, the oldest first.
        flags: By device, once one of its variables has had a sparse gradient.

    A kernel checks all rows of a call before the first update, and sets the device's flag if one is
    out of range. While the flag is set, kernels write nothing: neither those of this call nor those
    of later calls, until the host has read the flag. The host then undoes its own part of all these
    calls: they have no effect on this device or on the host.
    """

    def __init__(self) -> None:
        # Held by a call from its check to the reading of the flag: between them, the check of
        # another thread's call could set the flag, and this call would be applied in part.
        self._lock = Lock("an optimizer's row checks")
        self.flags: dict[Device, RowFlag] = {}
        self.calls: deque[_Call] = deque()
        # The thread whose kernels must look at the flags.
        self._thread: int | None = None
        register(self)

    def flag(self, device: Device) -> RowFlag | None:
        """Returns the flag that this thread's kernels must read before they write, or None."""
        return self.flags.get(device) if self._thread == threading.get_ident() else None

    @property
    def flags_of_this_thread(self) -> Mapping[Device, RowFlag]:
        """Those that `flag` returns, by device."""
        return self.flags if self._thread == threading.get_ident() else {}

    def unless_refused(self, device: Device, new: Any, old: Any) -> Any:
        """Returns what to write beside this call's updates: `old` if `device` refuses its rows.

        Args:
            device: Where both are.
            new: An array.
            old: An array that can be broadcast to its shape.
        """
        flag = self.flag(device)
        if flag is None:
            return new
        with backend_for(device).enter_reading(flag, kept=(flag, new, old)):
            return _row_flags(device).unless_set(flag, new, old)

    def call(
        self,
        write: Callable[[], None],
        grads_and_vars: Sequence[tuple[Gradient, Variable]],
        prepare_undo: Callable[[], Undo],
        must_check_first: Callable[[], bool],
    ) -> None:
        """Calls `write`, after the checks of its rows have been enqueued.

        Args:
            write: Applies the gradients.
            grads_and_vars: The call's pairs with sparse gradients.
            prepare_undo: Called before `write`; returns what undoes it.
            must_check_first: Returns whether `write` would write even if a flag is set. If so, the
                host waits for all checks before it calls `write`.

        Raises:
            IndexError: a row is out of range, and `must_check_first()` is true or GPUOPT_CHECK is
                1; or an earlier call's row is.
            DeadlineExceededError: another thread is in the middle of a call, and does not end it.
        """
        checks = [
            _Check(number, gradient.indices, variable)
            for number, (gradient, variable) in enumerate(grads_and_vars)
            if isinstance(gradient, IndexedSlices) and variable.device.kind == "gpu"
        ]
        if must_check_first():
            with self._lock:
                self._check_first(checks)
            write()
            return
        with self._lock:
            self._check_and_write(checks, write, prepare_undo)
        if checks and environment.settings().checks_at_once:
            self.raise_late(wait=True)

    def _check_first(self, checks: Sequence[_Check]) -> None:
        if checks:
            self._enqueue(checks, _nothing)
        self.raise_late(wait=True)

    def _check_and_write(
        self, checks: Sequence[_Check], write: Callable[[], None], prepare_undo: Callable[[], Undo]
    ) -> None:
        if checks or self.calls:
            self._enqueue(checks, write, prepare_undo())
        else:
            write()

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises what the checks have found; see `LateErrors`.

        Raises:
            IndexError: a row was out of range; its call and all later ones are undone.
        """
        if self.calls:
            check_for_late_errors(self._lock, partial(self._raise_found, device, wait=wait))

    def _raise_found(self, device: Device | None, *, wait: bool) -> None:
        self._read_flags()
        num_good = 0
        for number, call in enumerate(self.calls):
            is_good = True
            for place, read in call.reads.items():
                is_too_old = number < len(self.calls) - _MOST_CALLS
                if is_too_old or (wait and device in (None, place)):
                    read.wait(f"{place}, which checks rows of sparse gradients")
                if not read.is_done:
                    is_good = False
                elif read.values[0]:
                    self._refuse()
            if is_good and num_good == number:
                num_good += 1
            elif not wait:
                break
        for _ in range(num_good):
            self.calls.popleft()

    def _enqueue(
        self, checks: Sequence[_Check], write: Callable[[], None], undo: Undo | None = None
    ) -> None:
        """Has the rows checked before `write`, and notes the call, unless nothing came of it."""
        self._read_flags()
        devices = {check.variable.device for check in checks}
        for device in devices:
            if device not in self.flags:
                self.flags[device] = _row_flags(device).new()
        undo_call: Undo = _nothing_to_undo
        try:
            for device in devices:
                here = [check for check in checks if check.variable.device == device]
                rows = [RowCheck(n, rows, variable.shape[0]) for n, rows, variable in here]
                _row_flags(device).check(self.flags[device], rows)
            self._thread = threading.get_ident()
            write()
            undo_call = undo or _nothing_to_undo
        finally:
            self._thread = None
            described = {number: (v.name, v.shape[0]) for number, _, v in checks}
            self.calls.append(_Call(devices, {}, described, undo_call))
            self._read_flags()

    def _read_flags(self) -> None:
        """Begins to read the last call's flags, unless that has been done.

        It may have failed, for lack of memory, or been interrupted. It must come before the next
        check, which sets the same flags.
        """
        if not self.calls:
            return
        call = self.calls[-1]
        for device in call.devices:
            if device not in call.reads:
                call.reads[device] = _row_flags(device).read(self.flags[device])

    def _refuse(self) -> None:
        """Undoes the first call with a bad row, and all since, which have not been written."""
        calls = list(self.calls)
        for place, read in chain.from_iterable(call.reads.items() for call in calls):
            read.wait(f"{place}, which checks rows of sparse gradients")
        refused = [{place for place, read in c.reads.items() if read.values[0]} for c in calls]
        # Not by generators: Ctrl-C in one that `next` has left is lost.
        first = [bool(places) for places in refused].index(True)
        everywhere = set().union(*refused)
        bad, later = calls[first], len(calls) - first - 1
        by_bad = {place: read for place, read in bad.reads.items() if read.values[0]}
        device, read = next(iter(by_bad.items()))
        number, row = int(read.values[0]) - 1, int(read.values.view("int64")[1])
        name, height = bad.described[number]
        since = f", and neither have the {later} calls since" if later else ""
        # If this is interrupted, the next check finds the calls, and undoes them again.
        for place in everywhere:
            _row_flags(place).clear(self.flags[place])
        for call in reversed(calls[first:]):
            call.undo(everywhere)
        try:
            raise IndexError(
                f'gradient for "{name}": row {row} is not in [0, {height}), the variable\'s rows. '
                f"{device} found this after the call: it has changed nothing there{since}"
            )
        except IndexError:
            self.calls.clear()
            raise


def _row_flags(device: Device) -> RowFlags:
    flags = backend_for(device).row_flags
    assert flags is not None
    return flags


def _nothing() -> None:
    pass


def _nothing_to_undo(refused: Collection[Device]) -> None:
    pass
