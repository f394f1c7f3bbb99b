"""Whether there are GPUs, and the reason why gpuopt cannot use them."""

from __future__ import annotations

import ctypes
import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

# They all provide the module `cupy`. It is not imported: that alone may fail or take seconds.
CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
# cuda.h, CUresult.
_CUDA_ERROR_NO_DEVICE = 100
_OLDEST_CUDA = 12000
_CUDA_13 = 13000
# As in pyproject.toml.
_OLDEST_CUPY = (13, 3)


class Driver(NamedTuple):
    """The answers of NVIDIA's driver.

    Attributes:
        problem: Why there is no GPU, or None.
        cuda_version: The newest CUDA version that the driver can run, as 13000; 0 if unknown.
        gpus: The names of the GPUs.
    """

    problem: str | None
    cuda_version: int = 0
    gpus: tuple[str, ...] = ()


def ask_driver(library: str = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1") -> Driver:
    """Asks the driver itself; needs no CUDA software beside it."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Driver(f"no NVIDIA driver ({library} was not found)")
    count, cuda_version = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(cuda_version))
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, _CUDA_ERROR_NO_DEVICE):
        return Driver(f"the NVIDIA driver fails with CUDA error {status}", cuda_version.value)
    if count.value == 0:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
        return Driver(f"the NVIDIA driver finds no GPU{because}", cuda_version.value)
    names = []
    for index in range(count.value):
        handle, name = ctypes.c_int(0), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(handle), index)
        driver.cuDeviceGetName(name, len(name), handle)
        names.append(name.value.decode(errors="replace"))
    return Driver(None, cuda_version.value, tuple(names))


def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def why_no_gpu(driver: Driver | None = None) -> str | None:
    """Returns the first reason why gpuopt cannot use a GPU; None if it can. See `ask_driver`."""
    driver = driver or ask_driver()
    if driver.problem is not None:
        return driver.problem
    if driver.cuda_version < _OLDEST_CUDA:
        return "the NVIDIA driver is too old: CuPy needs one for CUDA 12 or newer"
    present = [name for name in CUPY_DISTRIBUTIONS if installed(name)]
    if len(present) > 1:
        return (
            f"{' and '.join(present)} are installed together and break each other: uninstall them, "
            f"then pip install '{_requirement(driver)}'"
        )
    if not present:
        return f"CuPy is not installed: pip install '{_requirement(driver)}'"
    if (found := too_old_cupy()) is not None:
        return f"{found}: pip install '{_requirement(driver)}'"
    wrong = other_flavour(driver)
    return wrong if driver.cuda_version < _CUDA_13 else None


def too_old_cupy() -> str | None:
    """Returns a message if the installed CuPy is older than gpuopt needs; else None."""
    for name in CUPY_DISTRIBUTIONS:
        found = installed(name)
        if found and tuple(map(int, re.findall(r"\d+", found)[:2])) < _OLDEST_CUPY:
            return f"{name} {found} is too old, gpuopt needs {_version(_OLDEST_CUPY)} or newer"
    return None


def other_flavour(driver: Driver) -> str | None:
    """Returns a message if CuPy is for another version of CUDA than the driver; else None.

    CuPy for CUDA 12 works with a driver for CUDA 13, but not the other way round.
    """
    fitting = f"cupy-cuda{_flavour(driver)}x"
    for name in ("cupy-cuda12x", "cupy-cuda13x"):
        if name != fitting and installed(name):
            return (
                f"{name} is installed, and the NVIDIA driver is for CUDA {_flavour(driver)}: pip "
                f"uninstall {name}, then pip install '{_requirement(driver)}'"
            )
    return None


def _requirement(driver: Driver) -> str:
    """Returns what gpuopt's extra "cuda12" or "cuda13" installs: pip cannot find gpuopt by name."""
    return f"cupy-cuda{_flavour(driver)}x[ctk]>={_version(_OLDEST_CUPY)},<15"


def _version(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _flavour(driver: Driver) -> int:
    return 13 if driver.cuda_version >= _CUDA_13 else 12
