"""Orders in which the driver that is not there runs what is queued on streams."""

from __future__ import annotations

import os
from typing import Any

import driver
import numpy as np
import pytest

NUM_SEEDS = 100 if os.environ.get("GPUOPT_FULL") == "1" else 3

_streams: list[Any] = []

# A real GPU has an order of its own.
SCHEDULES = (
    [("newest", 0), ("oldest", 0), *(("random", seed) for seed in range(NUM_SEEDS))]
    if driver.is_here()
    else [("the GPU's own", 0)]
)


def name_of_schedule(schedule: tuple[str, int]) -> str:
    policy, seed = schedule
    return f"{policy} {seed}" if policy == "random" else policy


def new_stream(device: int = 0) -> Any:
    """A stream that does not wait for the default one."""
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
    # The driver that is not there does not expect that its handle is given to another.
    _streams.append(stream)
    return stream


def uploaded(host: Any, stream: Any = None, device: int = 0) -> Any:
    """CuPy's array with these values, made on a stream."""
    import cupy

    with cupy.cuda.Device(device):
        if stream is None:
            return cupy.asarray(np.asarray(host))
        with stream:
            return cupy.asarray(np.asarray(host))


def wait_for_gpus() -> None:
    import cupy

    for device in range(cupy.cuda.runtime.getDeviceCount()):
        cupy.cuda.Device(device).synchronize()


def require_two_gpus() -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
