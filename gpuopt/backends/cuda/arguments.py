"""A launch's arguments, in memory as CUDA's driver takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.backends.cuda.kernel import WORD, Kernel
from gpuopt.backends.cuda.parameters import Memory


class Arguments:
    """The arguments of one kernel, packed once for many launches.

    A launch copies them: new values may be written while an earlier launch is still queued.

    Attributes:
        kernel: The kernel that they are for.
        address: Where the pointers to the arguments begin: `kernelParams` of `cuLaunchKernel`.
    """

    __slots__ = ("_bytes", "_given", "_memory", "_words", "address", "kernel")

    def __init__(self, kernel: Kernel, given: Mapping[str, Any], memory: Memory) -> None:
        """Checks and packs the arguments.

        Args:
            kernel: The kernel that they are for.
            given: By parameter: for a pointer an array, or, if it is optional, None or nothing; a
                number; for a struct a NamedTuple of these.
            memory: The launcher.

        Raises:
            TypeError: an argument is missing or unknown, or is not of the parameter's type.
        """
        kernel.check_names(given)
        self.kernel = kernel
        self._memory = memory
        # Arrays are kept alive.
        self._given: dict[str, Any] = {}
        self._words = np.zeros(kernel.words_of_arguments, np.uint64)
        self._bytes = self._words.data.cast("B")
        self.address: int = self._words.ctypes.data
        offsets = [place.offset for place in kernel.places.values()]
        self._words[: len(offsets)] = np.array(offsets, np.uint64) + np.uint64(self.address)
        self.replace(**given)

    def replace(self, **given: Any) -> None:
        """Checks and packs new values of some arguments; those that are the same are left.

        Raises:
            TypeError: an argument is not of the parameter's type.
        """
        places, memory, last = self.kernel.places, self._memory, self._given
        for name, value in given.items():
            if name in last and last[name] is value:
                continue
            parameter, pack_into, offset = places[name]
            try:
                values = parameter.to_values(value, memory)
            except TypeError as error:
                raise TypeError(f"{self.kernel.expression}: {name}{error}") from None
            pack_into(self._bytes, offset, *values)
            last[name] = value

    def forget(self, name: str) -> None:
        """Lets an array go, and leaves a null pointer to be replaced before the next launch."""
        self._given.pop(name, None)
        self._words[self.kernel.places[name].offset // WORD] = 0
