"""What this machine offers to gpuopt, and why a GPU is not usable."""

from __future__ import annotations

import ctypes
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

_LIBRARIES = ("numpy", "ml_dtypes", "torch", "matplotlib")
_CUPY_DISTRIBUTIONS = ("cupy-cuda12x", "cupy-cuda13x", "cupy")


class Driver(NamedTuple):
    """What NVIDIA's driver says.

    Attributes:
        problem: Why there is no GPU, or None.
        version: The newest CUDA version it can run, as 13000; 0 if unknown.
        gpus: The names of the GPUs.
    """

    problem: str | None
    version: int = 0
    gpus: tuple[str, ...] = ()


def ask_driver(library: str = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1") -> Driver:
    """Asks the driver itself; needs no CUDA software beside it."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return Driver(f"no NVIDIA driver: {library} was not found")
    if status := driver.cuInit(0):
        return Driver(f"the NVIDIA driver does not start: cuInit says {status}")
    cuda_version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(cuda_version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return Driver("the NVIDIA driver finds no GPU", cuda_version.value)
    names = []
    for index in range(count.value):
        name = ctypes.create_string_buffer(128)
        driver.cuDeviceGetName(name, len(name), index)
        names.append(name.value.decode())
    return Driver(None, cuda_version.value, tuple(names))


def installed(distribution: str) -> str | None:
    """Returns the version of an installed distribution, without importing it."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def why_no_gpu(driver: Driver) -> str:
    """Says what keeps gpuopt from using a GPU; the first obstacle first."""
    if driver.problem is not None:
        return driver.problem
    present = [name for name in _CUPY_DISTRIBUTIONS if installed(name)]
    if len(present) > 1:
        return f"{' and '.join(present)} are both installed and break each other: uninstall one"
    if not present:
        extra = "cuda13" if driver.version >= 13000 else "cuda12"
        return f"CuPy is not installed: pip install 'gpuopt[{extra}]'"
    return "this version of gpuopt has no CUDA backend: variables live in host memory"


def describe() -> list[tuple[str, str]]:
    """Returns (what, answer) rows for `gpuopt info`."""
    driver = ask_driver()
    cupy = [f"{name} {found}" for name in _CUPY_DISTRIBUTIONS if (found := installed(name))]
    rows = [
        ("gpuopt", installed("gpuopt") or "not installed, running from source"),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, installed(name) or "not installed") for name in _LIBRARIES),
        ("cupy", ", ".join(cupy) or "not installed"),
        ("cpu", f"usable, {os.cpu_count()} cores"),
    ]
    rows += [(f"gpu:{index}", f"{name}, not usable") for index, name in enumerate(driver.gpus)]
    return [*rows, ("gpu", f"not usable: {why_no_gpu(driver)}")]
