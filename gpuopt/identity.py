"""Who a variable is: its name, its lock, and the memory by which a raw array is known again."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import numpy as np

from gpuopt.device import Device

MemoryKey = tuple[Device, int, tuple[int, ...], tuple[int, ...], str]

# Reentrant: a garbage collection inside a guarded block may run `_forget` on the same thread.
_guard = threading.RLock()
_named: weakref.WeakValueDictionary[str, Identity] = weakref.WeakValueDictionary()
_by_memory: dict[MemoryKey, tuple[Identity, weakref.ref[Any]]] = {}


class Identity:
    """What optimizer state hangs on. Lives as long as its variable, or the memory of a raw array.

    Attributes:
        name: Unique among the living: a second "w" is "w_1", as in TensorFlow.
        lock: Held by updates with `use_locking=True`.
        last_update: A note of the device's backend, by which streams wait for each other.
    """

    __slots__ = ("__weakref__", "_next_suffix", "last_update", "lock", "name")

    def __init__(self, name: str) -> None:
        self.lock = threading.RLock()
        self.last_update: Any = None
        self._next_suffix = 1
        with _guard:
            self.name = unique_name(name)
            namesake = _named.get(name)
            if namesake is not None:
                # Makes a thousand variables of one name cheap; it goes when the first of them does.
                namesake._next_suffix = int(self.name[len(name) + 1 :]) + 1
            _named[self.name] = self

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


def unique_name(name: str) -> str:
    """Returns `name`, or the name with the suffix that a new variable of this name would get."""
    with _guard:
        namesake = _named.get(name)
        if namesake is None:
            return name
        suffix = namesake._next_suffix
        while f"{name}_{suffix}" in _named:
            suffix += 1
        return f"{name}_{suffix}"


def identity_of(array: Any, device: Device, address: int) -> Identity:
    """Finds a raw array's identity by its memory, or makes one.

    Two arrays of a device with the same address, shape, strides and dtype are one variable. The
    identity goes when the memory's owner does; it does not keep the owner alive.

    Args:
        array: On any device.
        device: Which one.
        address: Where its first element is.
    """
    key = (device, address, array.shape, array.strides, array.dtype.str)
    with _guard:
        found = _by_memory.get(key)
        if found is not None and found[1]() is not None:
            return found[0]
        identity = Identity("array")
        _by_memory[key] = identity, weakref.ref(_owner(array), partial(_forget, key))
        return identity


def _owner(array: Any) -> Any:
    """Walks to the object that owns the memory: an array, or what lent its buffer to one."""
    array_type = np.ndarray if isinstance(array, np.ndarray) else type(array)
    owner = array
    while isinstance(owner.base, array_type):
        owner = owner.base
    try:
        weakref.ref(owner.base)
    except TypeError:  # None, or a bytearray or capsule, which nothing can watch
        return owner
    return owner.base


def _forget(key: MemoryKey, dead: weakref.ref[Any]) -> None:
    with _guard:
        found = _by_memory.get(key)
        if found is not None and found[1] is dead:
            del _by_memory[key]
