"""What is done to CuPy when it is imported. CuPy itself is as it comes from its wheel."""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from driver import kernels, libraries
from driver.native_library import library
from driver.patch import patch

# How much CuPy's pool is asked for behind each block.
CANARY = 512
# What CuPy calls until the process ends.
_kept: list[Any] = []


class Hooks(importlib.abc.MetaPathFinder):
    """Does something before and after CuPy is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "cupy":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        # Whoever only asks whether CuPy is installed does not get so far.
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            before_cupy()
            execute(module)
            after_cupy()

        loader.exec_module = exec_module
        return spec


def before_cupy() -> None:
    # CuPy's own kernels instead of those of CUB, which are compiled already.
    os.environ["CUPY_ACCELERATORS"] = ""
    # No GPU runs what NVRTC makes, and its assembler takes a third of the time.
    os.environ["CUPY_COMPILE_WITH_PTX"] = "1"
    spec = importlib.util.find_spec("cupy_backends.cuda.api.runtime")
    assert spec is not None
    assert spec.origin is not None
    extension = Path(spec.origin)
    patch(extension, library())
    libraries.load(extension.parents[3])


def after_cupy() -> None:
    import cupy

    library().driver_set_find(kernels.find)
    kernels.watch(cupy.cuda.compiler)
    cupy.random = sys.modules["cupy.random"] = libraries.refused_random()
    if os.environ.get("GPUOPT_DRIVER_BLOCKS", "watched") == "watched":
        watch_blocks(cupy)


def watch_blocks(cupy: Any) -> None:
    """Puts a canary behind each of CuPy's blocks, and fills those that are freed."""
    lib = library()
    taken: dict[int, Any] = {}
    pool = cupy.get_default_memory_pool()

    # Not `PythonFunctionAllocator`: Python's garbage collector takes its functions from memory in a
    # cycle before the memory calls them.
    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    def take(_: int, num_bytes: int, device: int) -> None:
        with_canary = -(-num_bytes // CANARY) * CANARY + CANARY
        memory = pool.malloc(with_canary)
        taken[memory.ptr] = memory
        stream = cupy.cuda.get_current_stream().ptr
        lib.driver_part_taken(device, memory.ptr, num_bytes, with_canary, stream)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
    def free(_: int, at: int, device: int) -> None:
        lib.driver_part_freed(at)
        taken.pop(at, None)

    functions = take, lib.driver_take, free
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    allocator = cupy.cuda.CFunctionAllocator(*addresses, functions)
    _kept.extend([functions, allocator])
    cupy.cuda.set_allocator(allocator.malloc)


def install() -> None:
    sys.meta_path.insert(0, Hooks())
