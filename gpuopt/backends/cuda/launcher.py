"""The seam between the backend and whatever runs its kernels: a GPU, or the tests' emulator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.backends.cuda.kernel import Kernel


class Event(Protocol):
    """A point in a stream's work.

    Attributes:
        done: Whether everything before it is done.
    """

    done: bool

    def synchronize(self) -> None:
        """Has the host wait for it."""


class Download(NamedTuple):
    """A copy to the host that may still be under way.

    Attributes:
        values: To be read after `event`.
        event: The copy's end.
    """

    values: np.ndarray[Any, Any]
    event: Event


class Launcher(Protocol):
    """Runs kernels on one device. All methods but the first two are called inside `device()`.

    Attributes:
        xp: The module of the device's arrays: CuPy, or one like it.
        num_multiprocessors: How many blocks run side by side, at the least.
    """

    xp: Any
    num_multiprocessors: int

    def device(self) -> AbstractContextManager[Any]:
        """Makes the device this thread's current one."""

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        """Names what is done inside for profilers."""

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

    def owns(self, arrays: Sequence[Any]) -> bool:
        """Says whether all are in the device's memory."""

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Returns the addresses of many, int64."""

    def strided(self, arrays: Sequence[Any]) -> list[int]:
        """Returns which of them are not contiguous in C's order."""

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        """Copies host memory to a contiguous device array of the same size and type.

        In order with launches; `source` may be overwritten as soon as this returns.
        """

    def download(self, source: Any) -> Download:
        """Begins to copy a contiguous device array to the host, in order with launches."""

    def copy_of_peer(self, array: Any) -> Any:
        """Returns a copy of another device's array, in order with both current streams."""

    def stream(self) -> Hashable:
        """Returns the current stream: work on one stream is done in order."""

    def is_default_stream(self) -> bool:
        """Says whether the current stream is the one that a program has if it makes none."""

    def record(self, event: Any = None) -> Event:
        """Marks the present end of the current stream's work.

        Args:
            event: Is moved to there; by default a new one is made.
        """

    def wait(self, event: Event) -> None:
        """Has what follows on the current stream wait for an event of any stream."""


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
