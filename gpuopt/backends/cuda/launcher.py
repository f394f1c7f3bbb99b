"""The seam between the backend and whatever runs its kernels: a GPU, or the tests' emulator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel


class Launcher(Protocol):
    """Runs kernels on one device.

    Attributes:
        xp: The module of the device's arrays: CuPy, or one like it.
        num_multiprocessors: How many blocks run side by side, at the least.
    """

    xp: Any
    num_multiprocessors: int

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, arguments: Sequence[Any]
    ) -> None:
        """Starts a kernel on the device's current stream.

        Args:
            kernel: What to run.
            num_blocks: At least 1.
            num_threads: Of each block; a multiple of 32.
            arguments: One for each parameter: arrays of `xp` for pointers, numpy scalars otherwise.

        Raises:
            TypeError: an argument is not what the kernel takes.
        """

    def address(self, array: Any) -> int:
        """Returns where an array's first element is."""

    def stream(self) -> Hashable:
        """Returns the current stream: work on one stream is done in order."""

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        """Copies host memory to a contiguous device array of the same size and type.

        In order with launches; `source` may be overwritten as soon as this returns.
        """


def check_arguments(kernel: Kernel, arguments: Sequence[Any], array_type: type[Any]) -> None:
    """Refuses what a kernel does not take. CuPy itself passes on anything, bit by bit.

    Raises:
        TypeError: the number of arguments, or one's kind or dtype, is wrong.
    """
    if len(arguments) != len(kernel.parameters):
        raise TypeError(
            f"{kernel.expression} takes {len(kernel.parameters)} arguments, got {len(arguments)}"
        )
    for position, (argument, expected) in enumerate(zip(arguments, kernel.parameters, strict=True)):
        if isinstance(argument, array_type):
            got = f"*{argument.dtype.name}"
            if expected == "*void":
                continue
        else:
            got = argument.dtype.name if isinstance(argument, np.generic) else repr(argument)
        if got != expected:
            raise TypeError(
                f"{kernel.expression}: argument {position} must be {expected}, got {got}"
            )
