"""Puts the driver into this process, before CUDA is asked for anything."""

from __future__ import annotations

import os

from build_cache import build_cache

from driver import cupy_hooks, policy_of_process, set_policy
from driver.native_library import library


def install() -> None:
    number = os.environ.get
    library().driver_configure(
        int(number("GPUOPT_DRIVER_DEVICES", "2")),
        int(number("GPUOPT_DRIVER_MULTIPROCESSORS", "6")),
        int(number("GPUOPT_DRIVER_CUDA", "13000")),
    )
    set_policy(*policy_of_process())
    os.environ.setdefault("CUPY_CACHE_DIR", str(build_cache("cupy")))
    cupy_hooks.install()
