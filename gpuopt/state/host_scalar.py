"""HostScalar: a scalar of a GPU that the host computes with."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.locks import renew_after_fork
from gpuopt.variables.behind import own_numbers
from gpuopt.variables.variable import Variable


class HostScalar(Variable):
    """A variable on any device whose value is kept in host memory.

    Reading it on the host never waits for a GPU. `storage` and `value()` make an array on the
    device, on its current stream, with the value of that moment: what is written to this array is
    lost, other than what `assign` and its kin write.
    """

    __slots__ = ("_changing", "_known")

    def __init__(self, value: np.generic, name: str, device: Device) -> None:
        super().__init__(value, name=name, trainable=False)
        self.device = device
        # Not a lock of `gpuopt.locks`: it is held for one operation, so waits need no deadline.
        self._changing = threading.Lock()
        renew_after_fork(self)

    @property
    def memory(self) -> Device:
        return Device.cpu

    @property
    def _array(self) -> Any:
        """The array of this thread: a step's own number, while a GPU decides about steps."""
        if self.identity.behind is None:
            return self._known
        return own_numbers.of.get(self.identity, self._known)

    @_array.setter
    def _array(self, array: Any) -> None:
        self._known = array

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a copy."""
        # Inlined, because every step reads some.
        if self.identity.behind is None:
            return self._known.copy()  # type: ignore[no-any-return]
        self.identity.behind.bring_up()
        return self._array.copy()  # type: ignore[no-any-return]

    def scalar(self) -> Any:
        """Returns the value as a numpy scalar."""
        if self.identity.behind is None:
            return self._known[()]
        return self.numpy()[()]

    def multiply(self, factor: np.floating[Any]) -> None:
        """Multiplies in place; no product is lost if several threads do so at once."""
        with self._changing:
            number = self._known if self.identity.behind is None else self._array
            # numpy multiplies scalars several times as quickly as arrays of one.
            number[()] = number[()] * factor

    def add(self, term: float) -> None:
        """Adds in place; no sum is lost if several threads do so at once."""
        with self._changing:
            number = self._known if self.identity.behind is None else self._array
            number[()] = number[()] + term

    def raise_to(self, value: float) -> None:
        """Makes the value at least so large, in place."""
        with self._changing:
            np.maximum(self._array, value, out=self._array)

    def after_fork(self) -> None:
        self._changing = threading.Lock()

    @property
    def storage(self) -> Any:
        self.bring_up()
        return self.unread_storage

    @property
    def unread_storage(self) -> Any:
        if self.device.kind == "cpu":
            return self._array
        return backend_for(self.device).from_host(self._array)

    def unread_numbers(self) -> Any:
        return self.unread_storage
