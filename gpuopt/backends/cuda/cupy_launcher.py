"""Compiles kernels with NVRTC, through CuPy, and launches them on one GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import cupy
import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import Download, Launch, wait_for_event
from gpuopt.backends.cuda.page_locked import Landings, UploadBlocks
from gpuopt.backends.memory_owner import Owner, owner_by_lender
from gpuopt.device import register_device_arrays
from gpuopt.locks import Lock
from gpuopt.rules.sources import digest, on_disk

# The pointers of the stream that all threads share, and of the one that each has for itself.
_DEFAULT, _PER_THREAD = cupy.cuda.Stream.null.ptr, cupy.cuda.Stream.ptds.ptr
# How many bytes one copy has; a large upload takes several.
_LARGEST_COPY = 32 * 2**20
# driver_types.h, cudaError_t.
_NOT_READY = 600


class CupyLauncher:
    """Runs kernels on a GPU; see `Launcher`."""

    xp: Any = cupy

    def __init__(self, index: int) -> None:
        register_device_arrays(cupy.ndarray, lambda array: array.data.device_id)
        self._index = index
        self.name = f"gpu:{index}"
        attributes = cupy.cuda.Device(index).attributes
        self.num_multiprocessors = int(attributes["MultiProcessorCount"])
        self.cache_bytes = int(attributes["L2CacheSize"])
        self._functions: dict[Kernel, Any] = {}
        self._this_thread = _ThisThread()
        page_locked = f"gpu:{index}", cupy.cuda.alloc_pinned_memory, CupyEvent
        self._uploads = UploadBlocks(*page_locked)
        self._landings = Landings(*page_locked)
        self._page_locked = Lock(f"the page-locked memory of gpu:{index}")

    def device(self) -> AbstractContextManager[Any]:
        # A new one each time: a `cupy.cuda.Device` keeps the device to return to in itself, so
        # threads cannot share one.
        return cupy.cuda.Device(self._index)  # type: ignore[no-any-return]

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        return _ProfilingRange(name)

    def bind(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> Launch:
        find = partial(self._find, kernel, num_blocks, num_threads)
        return Launch(kernel, arguments, self, find, self)

    def _find(self, kernel: Kernel, *shape: int) -> Callable[[int], None]:
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = load(kernel).kernel
        return partial(self._start, function.ptr, *shape)

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> None:
        self.bind(kernel, num_blocks, num_threads, **arguments).start()

    def _start(self, function: int, num_blocks: int, num_threads: int, arguments: int) -> None:
        # Not by CuPy's call of a function, which looks at each argument's type and packs it.
        if not self._this_thread.has_context:
            cupy.cuda.runtime.memGetInfo()  # makes it the thread's, as CuPy does
            self._this_thread.has_context = True
        stream = cupy.cuda.get_current_stream().ptr
        _launch_kernel(function, num_blocks, 1, 1, num_threads, 1, 1, 0, stream, arguments, 0)

    def timed(self, start: Callable[[], object]) -> Callable[[], float]:
        begin, end = CupyEvent(timing=True), CupyEvent(timing=True)
        self.record(begin)
        start()
        self.record(end)
        return partial(self._elapsed_ms, begin, end)

    def _elapsed_ms(self, begin: CupyEvent, end: CupyEvent) -> float:
        with self.device():
            wait_for_event(end, f"what {self.name} has been asked to do")
            return float(cupy.cuda.get_elapsed_time(begin, end))

    def address(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def unowned(self, array: Any) -> Any:
        data = array.data
        memory = cupy.cuda.UnownedMemory(data.ptr, array.nbytes, None, data.device_id)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    def memory_owner(self, array: Any) -> Owner:
        while isinstance(array.base, cupy.ndarray):
            array = array.base
        memory = array.data.mem
        # Of UnownedMemory, and of SystemMemory on an array of the host.
        lender = getattr(memory, "_owner", None)
        # CuPy's memory objects cannot be watched; the first array on one, of which others are
        # views, can.
        if lender is None and isinstance(memory, _owning_memory()):
            return Owner(array)
        return owner_by_lender(memory if lender is None else lender, array, array.data.ptr)

    def owns(self, arrays: Sequence[Any]) -> bool:
        return {array.data.device_id for array in arrays} == {self._index}

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.array([array.data.ptr for array in arrays], np.int64)

    def strided(self, arrays: Sequence[Any]) -> list[int]:
        # `flags.c_contiguous` takes eight times as long.
        return [i for i, array in enumerate(arrays) if not array._c_contiguous]

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        if target.nbytes != source.nbytes or target.dtype != source.dtype:
            raise TypeError(
                f"cannot upload {source.nbytes} bytes of {source.dtype} to {target.nbytes} of "
                f"{target.dtype}"
            )
        stream = cupy.cuda.get_current_stream()
        values = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        for begin in range(0, values.size, _LARGEST_COPY):
            part = values[begin : begin + _LARGEST_COPY]
            destination = target.data + begin
            with self._page_locked:
                block = staged, event = self._uploads.take(part.size)
                staged[: part.size] = part
                destination.copy_from_host_async(staged.ctypes.data, part.size, stream)
                event.record(stream)
                self._uploads.put_back(block)

    def download(self, source: Any) -> Download:
        stream = cupy.cuda.get_current_stream()
        if source.nbytes > Landings.SIZE:
            landing = self._land_alone(source)
            address = landing.values.ctypes.data
        else:
            with self._page_locked:
                landing = self._landings.take(source)
            address = landing.address
        source.data.copy_to_host_async(address, source.nbytes, stream)
        self.record(landing.event)
        landing.is_recorded = True
        return landing

    def _land_alone(self, source: Any) -> Download:
        """Returns where a copy of a device array can land, in memory from CuPy's pool."""
        memory = cupy.cuda.alloc_pinned_memory(source.nbytes)
        values = np.frombuffer(memory, np.uint8, source.nbytes).view(source.dtype)
        return Download(values.reshape(source.shape), CupyEvent())

    def copy_of_peer(self, array: Any) -> Any:
        with array.device:
            # Before the event: CuPy would make it contiguous on the original's stream, too, without
            # a wait for that.
            source = array if array._c_contiguous else array.copy()
            written = self.record()
        self.wait(written)
        copy = source.copy()
        copied = self.record()
        # Until the copy is done, the original's stream must not go on: it may free the array, and
        # write other values to its memory.
        with array.device:
            self.wait(copied)
        return copy

    def stream(self) -> Hashable:
        stream = cupy.cuda.get_current_stream().ptr
        return stream, self._this_thread.key if stream == _PER_THREAD else None

    def is_default_stream(self) -> bool:
        return cupy.cuda.get_current_stream().ptr == _DEFAULT  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        stream = cupy.cuda.get_current_stream(self._index)
        if stream.ptr == _DEFAULT:  # which CUDA never captures
            return False
        with self.device():
            return stream.is_capturing()  # type: ignore[no-any-return]

    def record(self, event: Any = None) -> Any:
        if event is None:
            event = CupyEvent()
        event.record(cupy.cuda.get_current_stream())
        return event

    def wait(self, event: Any) -> None:
        cupy.cuda.get_current_stream().wait_event(event)


_launch_kernel = cupy.cuda.driver.launchKernel


class CupyEvent(cupy.cuda.Event):  # type: ignore[misc]
    """CuPy's event, whose own `done` is False for ever after an error of CUDA."""

    # Until there is one: CuPy's `__del__` looks at it also if Ctrl-C came before.
    ptr = 0

    def __init__(self, *, timing: bool = False) -> None:
        super().__init__(disable_timing=not timing)

    @property
    def done(self) -> bool:
        status = cupy.cuda.runtime.eventQuery(self.ptr)
        if status != _NOT_READY:
            cupy.cuda.runtime.check_status(status)
        return status != _NOT_READY  # type: ignore[no-any-return]


class _ThisThread(threading.local):
    """State of the current thread.

    Attributes:
        has_context: Whether the device's context was made the thread's own: CUDA's runtime does so
            in most calls, its driver does not.
        key: Tells its own stream from those of other threads, which have the same pointer. The ids
            of threads are used again.
    """

    def __init__(self) -> None:
        self.has_context = False
        self.key = object()


class _ProfilingRange:
    """NVTX's range. A generator would take longer than all that NVTX does."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        cupy.cuda.nvtx.RangePush(self._name)

    def __exit__(self, *error: object) -> None:
        cupy.cuda.nvtx.RangePop()


@cache
def _owning_memory() -> tuple[type[Any], ...]:
    memory = cupy.cuda.memory
    return (
        *(memory.Memory, memory.PooledMemory, memory.MemoryAsync, memory.ManagedMemory),
        *(memory.PythonFunctionAllocatorMemory, memory.CFunctionAllocatorMemory),
        memory.SystemMemory,
    )


def load(kernel: Kernel) -> Any:
    """Compiles a kernel, or finds it compiled in CuPy's cache on disk.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses the source.
    """
    folders = [on_disk(folder) for folder in kernel.include_folders]
    # CuPy's cache knows the source by its text, but not the headers that it includes.
    code = f"// {' '.join(map(digest, folders))}\n{kernel.source}"
    # Multiply-adds that are not fused have numpy's bits. Lines are for profilers; they change no
    # instruction.
    options = ("-std=c++17", "-fmad=false", "-lineinfo", *(f"-I{folder}" for folder in folders))
    module = cupy.RawModule(code=code, options=options, name_expressions=(kernel.expression,))
    return module.get_function(kernel.expression)
