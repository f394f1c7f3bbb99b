"""GPUs check rows of sparse gradients while the host goes on; a call with a bad row is undone."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import FlagRead, RowFlags
from gpuopt.device import Device
from gpuopt.locks import Lock
from gpuopt.step.pairs import Gradient
from gpuopt.variables.gate import undoing
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.late_errors import register
from gpuopt.variables.variable import Variable


class _Flag:
    """One device's flag. Calls on different streams take turns with it."""

    def __init__(self, flags: RowFlags) -> None:
        self.flags = flags
        self.array = flags.new()
        self.last_update: Any = None


class _Call(NamedTuple):
    """A call whose rows the host does not know to be in range yet.

    Attributes:
        reads: The flags of devices that got sparse gradients, on their way to the host.
        described: (name, height) of the variables with sparse gradients, by number.
        undo: Undoes the host's part of the call.
    """

    reads: dict[Device, FlagRead]
    described: Mapping[int, tuple[str, int]]
    undo: Callable[[], None]


class RowChecks:
    """The checks of one optimizer.

    Attributes:
        calls: The calls whose rows the host does not know to be in range yet, the oldest first.

    A kernel checks all rows of a call before the first update, and sets the device's flag if one is
    out of range. While the flag is set, kernels write nothing: neither those of this call nor those
    of later calls, until the host has read the flag. The host then undoes its own part of all these
    calls: they have no effect on this device or on the host.
    """

    def __init__(self) -> None:
        self._lock = Lock("an optimizer's row checks")
        self._flags: dict[Device, _Flag] = {}
        self.calls: deque[_Call] = deque()
        register(self)

    def flag(self, device: Device) -> Any:
        """Returns the flag that kernels on `device` read before they write; None if none exists."""
        found = self._flags.get(device)
        return None if found is None else found.array

    @contextmanager
    def checking(
        self,
        grads_and_vars: Sequence[tuple[Gradient, Variable]],
        undo: Callable[[], Callable[[], None]],
        at_once: Callable[[], bool],
    ) -> Iterator[None]:
        """Checks the rows of a call, which is the body of the `with` statement.

        Args:
            grads_and_vars: The call's pairs.
            undo: Called before the body if need be; returns a function that undoes the body's work.
            at_once: Returns whether the body would write even if a flag is set. If so, the host
                waits for the checks before the body runs.

        Raises:
            IndexError: a row is out of range, and `at_once()` is true or GPUOPT_CHECK is 1.
        """
        checks = [
            (number, gradient.indices, variable)
            for number, (gradient, variable) in enumerate(grads_and_vars)
            if isinstance(gradient, IndexedSlices) and variable.device.kind == "gpu"
        ]
        if not checks and not self.calls:
            yield
            return
        devices = {variable.device for _, _, variable in checks}
        for device in devices:
            if device not in self._flags:
                flags = backend_for(device).row_flags
                assert flags is not None
                self._flags[device] = _Flag(flags)
        undo_body = undo()
        described = {number: (v.name, v.shape[0]) for number, _, v in checks}
        for device in devices:
            flag = self._flags[device]
            with backend_for(device).enter_update(flag):
                for number, rows, variable in checks:
                    if variable.device == device:
                        flag.flags.check(flag.array, number, rows, variable.shape[0])
        if checks and at_once():
            self._note(devices, described, _nothing)
            self.raise_late(wait=True)
            yield
            return
        undo_call = _nothing
        try:
            yield
            undo_call = undo_body
        finally:
            self._note(devices, described, undo_call)
        if os.environ.get("GPUOPT_CHECK") == "1":
            self.raise_late(wait=True)

    def raise_late(self, device: Device | None = None, *, wait: bool) -> None:
        """Raises what the checks have found; see `LateErrors`.

        Raises:
            IndexError: a row was out of range; its call and all later ones are undone.
        """
        if not self.calls:
            return
        with undoing(), self._lock:
            while self.calls:
                for place, read in self.calls[0].reads.items():
                    if wait and device in (None, place):
                        read.wait(f"{place}, which checks rows of sparse gradients")
                    elif not read.is_done:
                        return
                    if read.values[0]:
                        self._refuse(place, read.values)
                self.calls.popleft()

    def _note(
        self,
        devices: set[Device],
        described: Mapping[int, tuple[str, int]],
        undo: Callable[[], None],
    ) -> None:
        with self._lock:
            reads = {}
            for device in devices:
                flag = self._flags[device]
                with backend_for(device).enter_update(flag):
                    reads[device] = flag.flags.read(flag.array)
            self.calls.append(_Call(reads, described, undo))

    def _refuse(self, device: Device, values: np.ndarray[Any, Any]) -> None:
        number, row = int(values[0]) - 1, int(values.view(np.int64)[1])
        name, height = self.calls[0].described[number]
        later = len(self.calls) - 1
        for call in reversed(self.calls):
            call.undo()
        self.calls.clear()
        for place, flag in self._flags.items():
            with backend_for(place).enter_update(flag):
                flag.flags.clear(flag.array)
        since = f", and neither have the {later} calls since" if later else ""
        raise IndexError(
            f'gradient for "{name}": row {row} is not in [0, {height}), the variable\'s rows. '
            f"{device} found this after the call: it has changed nothing there{since}"
        )


def _nothing() -> None:
    pass
