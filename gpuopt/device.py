"""Where an array lives: the host, or one GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

# DLPack's device types (dlpack.h, DLDeviceType).
_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13


@dataclass(frozen=True)
class Device:
    """One device. `str(device)` is the spelling users write: "cpu" or "gpu:1".

    Attributes:
        kind: "cpu" or "gpu".
        index: Which GPU; 0 for the CPU.
    """

    kind: Literal["cpu", "gpu"]
    index: int = 0

    cpu: ClassVar[Device]

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"gpu:{self.index}"

    @classmethod
    def parse(cls, device: Device | str) -> Device:
        """Reads "cpu", "gpu", "gpu:1" or TensorFlow's "/device:GPU:1", in any case.

        Raises:
            ValueError: the text names no device.
            TypeError: `device` is neither text nor a Device.
        """
        if isinstance(device, Device):
            return device
        if not isinstance(device, str):
            raise TypeError(f'device must be text such as "cpu" or "gpu:0", got {device!r}')
        match = re.fullmatch(r"/?(?:device:)?(cpu|gpu)(?::(\d+))?", device.lower())
        if match is None or (match[1] == "cpu" and int(match[2] or 0) != 0):
            raise ValueError(f'device must be "cpu", "gpu" or "gpu:<index>", got {device!r}')
        return cls.cpu if match[1] == "cpu" else cls("gpu", int(match[2] or 0))


Device.cpu = Device("cpu")


# How an array of a type tells the index of its GPU; see `register_device_arrays`.
_index_by_type: dict[type[Any], Callable[[Any], int]] = {}


def register_device_arrays(array_type: type[Any], index_of: Callable[[Any], int]) -> None:
    """Has `device_of` ask arrays of this very type by `index_of`, which is quicker than DLPack."""
    _index_by_type[array_type] = index_of


def device_of(array: Any) -> Device:
    """Reads the device of anything array-like; lists and numbers are in host memory.

    Raises:
        ValueError: the array lives on a device that is neither a CPU nor a CUDA GPU.
    """
    if isinstance(array, (np.ndarray, np.generic)):
        return Device.cpu
    index_of = _index_by_type.get(type(array))
    if index_of is not None:
        return Device("gpu", index_of(array))
    if not hasattr(type(array), "__dlpack_device__"):
        return Device.cpu
    kind, index = array.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return Device.cpu
    if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        return Device("gpu", index)
    raise ValueError(f"gpuopt knows CPUs and CUDA GPUs; this array is on DLPack device type {kind}")
