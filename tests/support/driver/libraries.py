"""Stand-ins for cuBLAS, cuFFT, cuSOLVER and NCCL, by the names that CuPy's extensions link to."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from driver.native_library import LIBRARIES, library, shared_library

# For each extension of CuPy: the library that it needs, and what stands in for some of it.
NEEDED: dict[str, tuple[str, list[str]]] = {
    "cupy_backends/cuda/libs/cublas.*.so": ("libcublas.so", ["blas.cpp"]),
    "cupy/cuda/cufft.*.so": ("libcufft.so", ["fft.cpp"]),
    "cupy_backends/cuda/libs/cusolver.*.so": ("libcusolver.so", ["solver.cpp"]),
    "cupy_backends/cuda/libs/cusparse.*.so": ("libcusparse.so", []),
    "cupy_backends/cuda/libs/curand.*.so": ("libcurand.so", []),
    "cupy_backends/cuda/libs/nccl.*.so": (
        "libnccl.so",
        ["nccl.cpp", "nccl_calls.cpp", "nccl_ranks.cpp", "nccl_values.cpp"],
    ),
}


def load(site: Path) -> None:
    """Loads the stand-ins, so that nobody looks for the libraries on disk.

    Args:
        site: The folder that CuPy is installed in.
    """
    for pattern, (stem, sources) in NEEDED.items():
        for extension in site.glob(pattern):
            soname, functions = _needs(extension, stem)
            ctypes.CDLL(str(_stand_in(soname, sources, functions)))
            if stem == "libcublas.so":
                # These are asked for by name, before cuBLAS and cuSOLVER are loaded.
                for name in ("cublasLt", "nvJitLink"):
                    ctypes.CDLL(str(_stand_in(soname.replace("cublas", name), [], [])))
    sys.modules["cupy.cuda.thrust"] = _thrust()


def refused_random() -> ModuleType:
    """Returns a module in the place of cupy.random, whose kernels are in machine code."""
    module = ModuleType("cupy.random")

    def refuse(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"the stub driver has no cupy.random.{name}: make random numbers with numpy.random"
        )

    module.__getattr__ = refuse  # type: ignore[method-assign]
    return module


def _needs(extension: Path, stem: str) -> tuple[str, list[str]]:
    """Returns the library's full name, and the functions that the extension calls."""
    header = subprocess.check_output(["objdump", "-p", str(extension)], text=True)
    fields = (line.split() for line in header.splitlines())
    [soname] = [line[1] for line in fields if line[:1] == ["NEEDED"] and line[1].startswith(stem)]
    listing = subprocess.check_output(["nm", "-D", "--undefined-only", str(extension)], text=True)
    symbols = [line.split()[-1].partition("@") for line in listing.splitlines()]
    # NCCL's symbols have no version.
    prefix = stem.removeprefix("lib").removesuffix(".so")
    return soname, [
        name
        for name, has_version, version in symbols
        if (version == soname if has_version else name.startswith(prefix))
    ]


def _stand_in(soname: str, sources: Sequence[str], functions: Sequence[str]) -> Path:
    """Compiles a library that has these functions; those that `sources` lack refuse."""
    refusals = [
        f'extern "C" __attribute__((weak)) int {name}() {{ return driver::missing("{name}"); }}'
        for name in functions
    ]
    text = "\n".join(['#include "libraries/call.h"', *refusals, ""])
    return shared_library(soname, [LIBRARIES / name for name in sources], text, is_part=False)


def _thrust() -> ModuleType:
    """Returns a module in the place of CuPy's extension, which sorts."""
    module: Any = ModuleType("cupy.cuda.thrust")
    module.available = True
    module.get_build_version = lambda: 0
    module.sort = _sort
    module.argsort = _argsort
    module.lexsort = _lexsort
    return module  # type: ignore[no-any-return]


def _sort(dtype: Any, data: int, keys: int, shape: Any) -> None:
    _sort_rows(dtype, data, None, shape)


def _argsort(dtype: Any, positions: int, data: int, keys: int, shape: Any) -> None:
    _sort_rows(dtype, data, positions, shape)


def _lexsort(*arguments: Any) -> None:
    raise NotImplementedError("the driver has no lexsort")


def _sort_rows(dtype: Any, data: int, positions: int | None, shape: Any) -> None:
    import cupy
    import numpy as np

    length = shape[-1]
    rows = int(np.prod(shape[:-1]))
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
    kind = np.dtype(dtype).str[1:].encode()
    if library().driver_sort(device, stream, kind, data, positions, rows, length):
        raise RuntimeError(f"{dtype} cannot be sorted here; see the driver's reports")
