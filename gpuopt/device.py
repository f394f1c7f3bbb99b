"""Devices, and which device an array is on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

# What users need; the rest is for gpuopt itself.
__all__ = ["Device"]

# DLPack's device types (dlpack.h, DLDeviceType).
_DLPACK_CPU = 1
_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13


@dataclass(frozen=True, init=False, eq=False)
class Device:
    """One device. `str(device)` is the spelling users write: "cpu" or "gpu:1".

    Each device has one object: a step compares devices for each array.

    Attributes:
        kind: "cpu" or "gpu".
        index: Which GPU; 0 for the CPU.
    """

    kind: Literal["cpu", "gpu"]
    index: int

    cpu: ClassVar[Device]
    _all: ClassVar[dict[tuple[str, int], Device]] = {}

    def __new__(cls, kind: Literal["cpu", "gpu"], index: int = 0) -> Device:
        found = cls._all.get((kind, index))
        if found is None:
            made = object.__new__(cls)
            object.__setattr__(made, "kind", kind)
            object.__setattr__(made, "index", index)
            found = cls._all.setdefault((kind, index), made)
        return found

    def __reduce__(self) -> tuple[type[Device], tuple[str, int]]:
        return Device, (self.kind, self.index)

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
            hint = ': what torch calls "cuda:0" is "gpu:0"' if device.startswith("cuda") else ""
            raise ValueError(f'device must be "cpu", "gpu" or "gpu:<index>", got {device!r}{hint}')
        return cls.cpu if match[1] == "cpu" else cls("gpu", int(match[2] or 0))


Device.cpu = Device("cpu")


# For each type of array on a GPU: a function from an array to the index of its GPU.
_index_by_type: dict[type[Any], Callable[[Any], int]] = {}


def register_device_arrays(array_type: type[Any], index_of: Callable[[Any], int]) -> None:
    """Makes `device_of` call `index_of` for arrays of this type, which is faster than DLPack.

    Args:
        array_type: The exact type; subclasses are not included.
        index_of: Returns the index of an array's GPU.
    """
    _index_by_type[array_type] = index_of


def device_of(array: Any) -> Device:
    """Returns the device of an array; lists and numbers are in host memory.

    Raises:
        ValueError: the array is on a device that is neither a CPU nor a CUDA GPU.
    """
    index_of = _index_by_type.get(type(array))
    if index_of is not None:
        index = index_of(array)
        return Device._all.get(("gpu", index)) or Device("gpu", index)
    if isinstance(array, (np.ndarray, np.generic)):
        return Device.cpu
    if not hasattr(type(array), "__dlpack_device__"):
        return Device.cpu
    kind, index = array.__dlpack_device__()
    if kind == _DLPACK_CPU:
        return Device.cpu
    if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
        return Device("gpu", index)
    raise ValueError(
        f"the array is on DLPack device type {kind}; gpuopt supports CPUs and CUDA GPUs"
    )
