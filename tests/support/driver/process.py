"""Puts the driver into this process, before CUDA is asked for anything."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from pathlib import Path

from build_cache import build_cache

from driver import cupy_hooks, policy_of_process, set_policy
from driver.native_library import library


def install() -> None:
    number = os.environ.get
    library().driver_configure(
        int(number("GPUOPT_DRIVER_DEVICES", "5")),
        int(number("GPUOPT_DRIVER_MULTIPROCESSORS", "6")),
        cuda_of_cupy(),
        ctypes.c_uint64(int(number("GPUOPT_DRIVER_FIRST_ADDRESS", "0x200000000000"), 16)),
    )
    set_policy(*policy_of_process())
    os.environ.setdefault("CUPY_CACHE_DIR", str(build_cache("cupy")))
    cupy_hooks.install()


def cuda_of_cupy() -> int:
    """Returns the version of CUDA that the installed CuPy is for, as 13000."""
    spec = importlib.util.find_spec("cupy")
    wheel = Path(spec.origin).parent / ".data" / "_wheel.json" if spec and spec.origin else None
    if wheel is None or not wheel.exists():
        return 13000
    major = json.loads(wheel.read_text())["cuda"].split(".")[0]
    return 1000 * int(major)
