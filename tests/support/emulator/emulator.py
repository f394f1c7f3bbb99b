"""A launcher for machines without a GPU: the same kernels, run on the CPU, in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from types import ModuleType
from typing import Any

import fake_cupy
import numpy as np

from emulator import kernel_library
from emulator.kernel_library import KernelError
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Download, Launch
from gpuopt.backends.memory_owner import Owner, array_at, owner_of

__all__ = ["EmulatorLauncher", "KernelError"]


class EmulatedEvent:
    """An event of a device on which everything is done at once, unless a test says otherwise."""

    def __init__(self) -> None:
        self.stream = 0
        self.done = True


class _ContiguousMemory:
    """The launcher's memory, for arguments."""

    def __init__(self, launcher: EmulatorLauncher) -> None:
        self.xp = launcher.xp
        self.address_of = launcher.address

    def address(self, array: Any) -> int:
        if not array.flags.c_contiguous:
            raise TypeError(" is not C-contiguous")
        return self.address_of(array)


class EmulatorLauncher:
    """Launches run to their end at once, in the order of blocks and threads that `seed` gives.

    Addresses in tables that kernels read are those of host memory: `array.ctypes.data`.

    Args:
        seed: Decides the order; 0 takes blocks and threads by their numbers.
        strict: Whether to refuse programs that run on GPUs although CUDA does not allow them:
            barriers that exited threads do not reach, masks that name lanes that do not exist.
        sanitize: "address" (with undefined behaviour), "thread" or "", for
            GPUOPT_EMULATOR_SANITIZE. See sanitized.py.
        xp: The module of the arrays: numpy, or fake_cupy.
        index: The device's index, for fake_cupy.

    Attributes:
        launches: How many launches there have been.
        uploads: How many uploads there have been.
        waits: (stream, the stream whose event it waits for), of each wait.
        ranges: The names of profiling ranges.
        name: The device's.
        num_multiprocessors: Enough for several blocks in one launch.
    """

    def __init__(
        self,
        seed: int = 0,
        strict: bool = True,
        sanitize: str = "",
        xp: ModuleType = np,
        index: int = 0,
    ) -> None:
        self.xp = xp
        self.launches = 0
        self.uploads = 0
        self.waits: list[tuple[int, int]] = []
        self.ranges: list[str] = []
        self._index = index
        self.name = f"gpu:{index}"
        self._seed = seed
        self._strict = strict
        self._sanitize = sanitize or os.environ.get("GPUOPT_EMULATOR_SANITIZE", "")
        self.cache_bytes = 0  # there is none
        # ThreadSanitizer takes about a megabyte for each thread of a launch.
        self.num_multiprocessors = 2 if self._sanitize == "thread" else 4

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compiles many kernels at once, which takes much less time than one after another."""
        kernel_library.compile_all(kernels, self._sanitize)

    def bind(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> Launch:
        """Prepares runs of a kernel.

        Raises:
            TypeError: an argument is not what the kernel takes, or not C-contiguous.
            KernelError: the kernel does not compile, or is declared wrongly.
        """
        self._check_device()

        def find() -> Callable[[int], None]:
            return partial(self.start, kernel, self.find(kernel), num_blocks, num_threads)

        return Launch(kernel, arguments, _ContiguousMemory(self), find, self)

    def find(self, kernel: Kernel) -> kernel_library.Function:
        """Returns what runs a kernel; tests override this."""
        return kernel_library.find(kernel, self._sanitize)

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> None:
        """Runs a kernel.

        Raises:
            TypeError: an argument is not what the kernel takes, or not C-contiguous.
            KernelError: the kernel does not compile, is declared wrongly, or fails.
        """
        self.bind(kernel, num_blocks, num_threads, **arguments).start()

    def start(
        self,
        kernel: Kernel,
        function: kernel_library.Function,
        num_blocks: int,
        num_threads: int,
        arguments: int,
    ) -> None:
        """Runs a kernel with the arguments at an address; tests override this."""
        self._check_device()
        self.launches += 1
        report = function.launch(num_blocks, num_threads, arguments, self._seed, self._strict)
        if report is not None:
            raise KernelError(f"{kernel.expression}: {report}")

    def device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.xp is np else self.xp.cuda.Device(self._index)

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        self.ranges.append(name)
        return nullcontext()

    def timed(self, start: Callable[[], object]) -> Callable[[], float]:
        begin = perf_counter()
        start()
        ms = (perf_counter() - begin) * 1e3
        return lambda: ms

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns numpy's array on the same memory."""
        return fake_cupy.host_memory(array)

    def address(self, array: Any) -> int:
        return self.host(array).ctypes.data

    def unowned(self, array: Any) -> Any:
        memory = array_at(self.address(array), self.host(array))
        return memory if self.xp is np else self.xp.on_memory(memory, array.device_id)

    def memory_owner(self, array: Any) -> Owner:
        if self.xp is np:
            return owner_of(array, self.address(array))
        first = array if array.base is None else array.base
        return Owner(first, "another library" if first.is_lent else None)

    def owns(self, arrays: Sequence[Any]) -> bool:
        return {array.device_id for array in arrays} == {self._index}

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.array(list(map(self.address, arrays)), np.int64)

    def strided(self, arrays: Sequence[Any]) -> list[int]:
        return [i for i, array in enumerate(arrays) if not array.flags.c_contiguous]

    def stream(self) -> int:
        return 0 if self.xp is np else self.xp.cuda.current.stream  # type: ignore[no-any-return]

    def is_default_stream(self) -> bool:
        return self.stream() == 0

    def is_capturing(self) -> bool:
        return False

    def _check_device(self) -> None:
        if self.xp is not np and self.xp.cuda.current.device != self._index:
            raise KernelError(f"device {self._index} is not the current one")

    def record(self, event: EmulatedEvent | None = None) -> EmulatedEvent:
        self._check_device()
        event = event or EmulatedEvent()
        event.stream = self.stream()
        return event

    def wait(self, event: EmulatedEvent) -> None:
        self.waits.append((self.stream(), event.stream))

    def download(self, source: Any) -> Download:
        return Download(self.host(source).copy(), self.record())

    def copy_of_peer(self, array: Any) -> Any:
        copy = self.xp.empty(array.shape, dtype=array.dtype)
        self.host(copy)[...] = self.host(array)
        return copy

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        """Copies host memory to a contiguous array of the same size and type."""
        self._check_device()
        host = self.host(target)
        if not host.flags.c_contiguous:
            raise TypeError("upload writes to contiguous arrays")
        if (host.dtype, host.size) != (source.dtype, source.size):
            raise TypeError(
                f"upload of {source.size} {source.dtype} elements to {host.size} of {host.dtype}"
            )
        host.reshape(-1)[:] = source.reshape(-1)
        self.uploads += 1
