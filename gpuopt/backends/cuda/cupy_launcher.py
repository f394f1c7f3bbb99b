"""Compiles kernels with NVRTC, through CuPy, and launches them on one GPU."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.resources import as_file
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.launcher import check_arguments
from gpuopt.kernel_sources import kernel_root

# How far uploads may run ahead of the GPU before the host waits.
_MAX_STAGED = 256


class CupyLauncher:
    """Runs kernels on a GPU; see `Launcher`. The GPU must be the current device."""

    xp: Any = cupy

    def __init__(self) -> None:
        self.num_multiprocessors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._functions: dict[Kernel, Any] = {}
        # (page-locked memory, the event after which it is free again), the oldest first.
        self._staged: deque[tuple[Any, Any]] = deque()

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, arguments: Sequence[Any]
    ) -> None:
        check_arguments(kernel, arguments, cupy.ndarray)
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = load(kernel)
        function((num_blocks,), (num_threads,), tuple(arguments))

    def address(self, array: Any) -> int:
        return array.data.ptr  # type: ignore[no-any-return]

    def stream(self) -> Hashable:
        stream = cupy.cuda.get_current_stream()
        is_own = stream.ptr == cupy.cuda.Stream.ptds.ptr  # one number for each thread's own
        return stream.ptr, threading.get_ident() if is_own else 0

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        if target.nbytes != source.nbytes or target.dtype != source.dtype:
            raise TypeError(
                f"cannot upload {source.nbytes} bytes of {source.dtype} to {target.nbytes} of "
                f"{target.dtype}"
            )
        memory, event = self._staging_memory(source.nbytes)
        staged = np.frombuffer(memory, source.dtype, source.size)
        staged[:] = source.reshape(-1)
        stream = cupy.cuda.get_current_stream()
        target.data.copy_from_host_async(staged.ctypes.data, source.nbytes, stream)
        event.record(stream)
        self._staged.append((memory, event))

    def _staging_memory(self, num_bytes: int) -> tuple[Any, Any]:
        """Takes page-locked memory that no copy reads any more."""
        if self._staged:
            memory, event = self._staged[0]
            if len(self._staged) >= _MAX_STAGED:
                event.synchronize()
            if event.done:
                self._staged.popleft()
                if memory.size() >= num_bytes:
                    return memory, event
        # At least a page, so that memory fits whatever comes next.
        size = max(4096, 1 << (num_bytes - 1).bit_length())
        return cupy.cuda.alloc_pinned_memory(size), cupy.cuda.Event(disable_timing=True)


def load(kernel: Kernel) -> Any:
    """Compiles a kernel, or finds it compiled in CuPy's cache on disk.

    Raises:
        cupy.cuda.compiler.CompileException: NVRTC refuses the source.
    """
    folder = _kernel_folder()
    # CuPy's cache knows the source by its text, but not the headers that it includes.
    code = f"// {_digest(folder)}\n{kernel.source}"
    options = ("-std=c++17", f"-I{folder}")
    module = cupy.RawModule(code=code, options=options, name_expressions=(kernel.expression,))
    return module.get_function(kernel.expression)


@cache
def _kernel_folder() -> Path:
    """The folder of the sources, for as long as the process lives."""
    return ExitStack().enter_context(as_file(kernel_root()))


@cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
