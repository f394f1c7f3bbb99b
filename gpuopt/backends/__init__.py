"""Finds the backend that runs on a device, and brings arrays to a device."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from gpuopt.backends.backend import Array, Backend, Target, Updated
from gpuopt.backends.cuda import cuda_backend
from gpuopt.backends.numpy_backend import NumpyBackend
from gpuopt.device import Device, device_of

__all__ = ["Backend", "Target", "Updated", "backend_for", "moved", "profiling_range", "stored"]

_numpy_backend = NumpyBackend()
_backends: dict[Device, Backend] = {Device.cpu: _numpy_backend}
_making = threading.Lock()


def backend_for(device: Device) -> Backend:
    """Returns the backend of `device`.

    Raises:
        DeviceUnavailableError: nothing here can run on `device`; the message says why.
    """
    if device is Device.cpu:  # asked for many times in a step
        return _numpy_backend
    found = _backends.get(device)
    if found is None:
        with _making:
            found = _backends.get(device)
            if found is None:
                found = _backends[device] = cuda_backend(device)
    return found


def moved(array: Any, device: Device) -> Array:
    """Returns an array of `device`: on the same memory if it is there already, else a copy.

    Copies go to the current stream of a GPU. Only a copy to the host waits for it.

    Args:
        array: Anything array-like, on any device that can be used.
        device: Where it is wanted.

    Raises:
        DeviceUnavailableError: it is on a device that cannot be used, or wanted there.
    """
    if type(array) is np.ndarray and device is Device.cpu:
        return array
    source, target = device_of(array), backend_for(device)
    if source == device:
        return target.as_array(array)
    here = backend_for(source)
    array = here.as_array(array)
    if source.kind == "cpu":
        return target.from_host(array)
    return here.to_host(array) if device.kind == "cpu" else target.from_peer(array)


def stored(value: Any, device: Device, dtype: Any, shape: tuple[int, ...] | None = None) -> Array:
    """Returns new storage on `device`, filled with `value`.

    Args:
        value: A number, or an array of any device.
        device: Where the storage is wanted.
        dtype: The storage's.
        shape: The storage's; by default the value's.
    """
    if device_of(value).kind == "gpu":
        value = moved(value, device)
    return backend_for(device).full(
        getattr(value, "shape", ()) if shape is None else shape, np.dtype(dtype), value
    )


def profiling_range(name: str) -> AbstractContextManager[Any]:
    """Has NVIDIA's profilers show what is done inside under this name, once a GPU is in use."""
    for backend in list(_backends.values()):
        if backend.device.kind == "gpu":
            return backend.profiling_range(name)
    return nullcontext()
