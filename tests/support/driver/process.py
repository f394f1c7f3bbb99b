"""Puts the driver into this process, before CUDA is asked for anything."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

from build_cache import build_cache

from driver import cupy_hooks, policy_of_process, set_policy
from driver.native_library import library


def install() -> None:
    num_devices = int(os.environ.get("GPUOPT_DRIVER_DEVICES", "5"))
    library().driver_configure(num_devices, cuda_of_cupy())
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
