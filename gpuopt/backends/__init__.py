"""Finds the backend that runs on a device."""

from __future__ import annotations

from gpuopt.backends.backend import Backend, Target
from gpuopt.backends.numpy_backend import NumpyBackend
from gpuopt.device import Device
from gpuopt.errors import DeviceUnavailableError

__all__ = ["Backend", "Target", "backend_for"]

_numpy_backend = NumpyBackend()


def backend_for(device: Device) -> Backend:
    """Returns the backend of `device`.

    Raises:
        DeviceUnavailableError: nothing here can run on `device`.
    """
    if device.kind == "cpu":
        return _numpy_backend
    raise DeviceUnavailableError(
        f'"{device}" was asked for, but this version of gpuopt runs on "cpu" alone; '
        "`gpuopt info` says more"
    )
