"""Finds the backend that runs on a device, and brings arrays to a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from gpuopt.backends.backend import Array, Backend, Target, Updated
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda import cuda_backend
from gpuopt.backends.memory_owner import Owner
from gpuopt.device import Device, device_of
from gpuopt.errors import DeviceUnavailableError
from gpuopt.locks import Lock

__all__ = [
    "Backend",
    "Owner",
    "Target",
    "Updated",
    "backend_for",
    "to_device",
    "profiling_range",
    "new_storage",
    "using",
    "refuse_masked",
]

_cpu_backend: Backend = CpuBackend()
_backends: dict[Device, Backend] = {Device.cpu: _cpu_backend}
_lost_in_fork: dict[Device, Backend] = {}
_making = Lock("the making of a GPU's backend")

# A plain set instead of a function, because each step reads it.
array_types: set[type[Any]] = {np.ndarray}
"""The types of plain arrays of the devices that are in use."""
gpu_backends: list[Backend] = []
"""The backends of the GPUs that are in use."""


def backend_for(device: Device) -> Backend:
    """Returns the backend of `device`.

    Raises:
        DeviceUnavailableError: nothing here can run on `device`; the message says why.
    """
    if device is Device.cpu:  # asked for many times in a step
        return _cpu_backend
    found = _backends.get(device)
    if found is None:
        with _making:
            if device in _lost_in_fork:
                raise DeviceUnavailableError(
                    f"{device} was in use before this process was forked, and CUDA cannot go on in "
                    "a forked child; start it by spawn, or before the first use of a GPU"
                )
            found = _backends.get(device)
            if found is None:
                found = cuda_backend(device)
                _use(device, found)
    return found


@contextmanager
def using(device: Device, backend: Backend) -> Iterator[None]:
    """Makes `backend` the backend of `device`, in all threads, while the context is open.

    An optimizer caches plans of the backend, so one that was made inside must not be used outside.
    """
    before = _backends.get(device)
    _use(device, backend)
    try:
        yield
    finally:
        _use(device, before)


def to_device(array: Any, device: Device) -> Array:
    """Returns an array of `device`: on the same memory if it is there already, else a copy.

    Copies go to the current stream of a GPU. Only a copy to the host waits for it.

    Args:
        array: Anything array-like, on any device that can be used.
        device: The device that the result must be on.

    Raises:
        DeviceUnavailableError: `device`, or the device that the array is on, cannot be used.
        TypeError: the array is masked.
    """
    if type(array) in array_types and device_of(array) is device:
        return array
    refuse_masked(array, "the value")
    source, target = device_of(array), backend_for(device)
    if source is device:
        return target.as_array(array)
    here = backend_for(source)
    array = here.as_array(array)
    if source.kind == "cpu":
        return target.from_host(array)
    return here.to_host(array) if device.kind == "cpu" else target.from_peer(array, here)


def new_storage(
    value: Any, device: Device, dtype: Any, shape: tuple[int, ...] | None = None
) -> Array:
    """Returns new storage on `device`, filled with `value`.

    Args:
        value: A number, or an array of any device.
        device: Where the storage is wanted.
        dtype: The storage's.
        shape: The storage's; by default the value's.

    Raises:
        TypeError: the value is a masked array.
    """
    refuse_masked(value, "the value")
    if device_of(value).kind == "gpu":
        value = to_device(value, device)
    return backend_for(device).full(
        getattr(value, "shape", ()) if shape is None else shape, np.dtype(dtype), value
    )


def refuse_masked(value: Any, what: str) -> None:
    """Raises TypeError if `value`, called `what` in the message, is a masked array.

    So is a list or tuple with one inside: conversions would ignore the masks.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array; fill it first, as by array.filled(0)")
    if isinstance(value, list | tuple) and _has_masked(value):
        raise TypeError(f"{what} has a masked array inside; fill it first, as by array.filled(0)")


def profiling_range(name: str) -> AbstractContextManager[Any]:
    """Names the work inside for NVIDIA's profilers, once a GPU is in use."""
    return gpu_backends[0].profiling_range(name) if gpu_backends else nullcontext()


def _has_masked(values: Any) -> bool:
    waiting, seen = [values], set()  # a list may hold itself
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        # By type first: long lists of numbers are quick to look through.
        types = set(map(type, each))
        if any(issubclass(kind, np.ma.MaskedArray) for kind in types):
            return True
        if any(issubclass(kind, list | tuple) for kind in types):
            waiting.extend(inner for inner in each if isinstance(inner, list | tuple))
    return False


def _forget_gpus() -> None:
    """A forked child has no CUDA context: each call would fail in its own words."""
    # Kept: the end of an event is a call, too, which may wait for a lock of CUDA's that a thread of
    # the parent had.
    _lost_in_fork.update({d: backend for d, backend in _backends.items() if d.kind == "gpu"})
    for device in _lost_in_fork:
        _use(device, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_gpus)


def _use(device: Device, backend: Backend | None) -> None:
    global _cpu_backend
    if backend is None:
        _backends.pop(device, None)
    else:
        _backends[device] = backend
        array_types.add(backend.xp.ndarray)
        if device is Device.cpu:
            _cpu_backend = backend
    gpu_backends[:] = [each for place, each in _backends.items() if place.kind == "gpu"]
