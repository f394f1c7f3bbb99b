"""Finds the module that computes with an array in a loss: numpy, or CuPy once it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_modules: dict[type, Any] = {np.ndarray: np}


def array_module(array: Any) -> Any:
    """Returns the module that computes with `array`; numpy for numbers."""
    return _modules.get(type(array), np)


def is_array(value: Any) -> bool:
    """Says whether `value` is an array of numpy's or of a device, with memory that may change."""
    return type(value) in _modules


def is_array_type(array_type: type) -> bool:
    """Says whether losses can compute with arrays of this type."""
    return array_type in _modules


def add_array_type(array_type: type, module: Any) -> None:
    """Has `module` compute with arrays of `array_type`."""
    _modules[array_type] = module


def arrays_in(value: Any) -> Iterator[Any]:
    """Finds the arrays in `value`, which may be a nested list or tuple, as an index is."""
    if type(value) in _modules:
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from arrays_in(element)


def memory_owner(array: Any) -> Any:
    """Returns the array, or the other object, that owns the memory of a view."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


def overlap(one: Any, other: Any) -> bool:
    """Says whether two arrays may share memory, as far as their bounds tell."""
    if type(one) is not type(other):
        return False
    return bool(array_module(one).may_share_memory(one, other))
