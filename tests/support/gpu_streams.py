"""Streams and arrays for tests of what may happen in which order."""

from __future__ import annotations

from typing import Any

import numpy as np

_streams: list[Any] = []


def new_stream(device: int = 0) -> Any:
    """A stream that does not wait for the default one."""
    import cupy

    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
    # Until the test ends, so that no two of its streams have one handle after the other.
    _streams.append(stream)
    return stream


def drop_streams() -> None:
    """Destroys the streams of a test that has ended."""
    _streams.clear()


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
