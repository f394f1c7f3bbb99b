"""The types of an update's arrays, where they are not all the same."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from gpuopt.backends.cuda.parameters import CPP_TYPES, name_of


class Mixed(NamedTuple):
    """The types of a variable, its slots and its gradient; see `Mixed` in kernels/shared.

    Attributes:
        var: numpy's name of the variable's.
        slots: That of all slots.
        gradient: The gradient's.
    """

    var: str
    slots: str
    gradient: str


# What kernels are compiled for: the name of the only type, or several.
Storage: TypeAlias = str | Mixed


def storage_of(var: np.dtype[np.generic], gradient: np.dtype[np.generic]) -> Storage:
    """Returns what a kernel is compiled for.

    Args:
        var: The dtype of the variable and its slots.
        gradient: The gradient's.
    """
    if gradient == var:
        return name_of(var)
    return Mixed(name_of(var), name_of(var), name_of(gradient))


def cpp_storage(storage: Storage) -> str:
    """Returns the template argument."""
    if isinstance(storage, str):
        return CPP_TYPES[storage]
    return f"gpuopt::Mixed<{', '.join(CPP_TYPES[each] for each in storage)}>"


def real_of(storage: Storage) -> str:
    """Returns what a rule computes in."""
    return "float64" if storage == "float64" else "float32"


def element_bytes(storage: Storage) -> int:
    """Returns the size of an element of the widest type: packs have as many of these as fit."""
    names = (storage,) if isinstance(storage, str) else storage
    return max(np.dtype(name).itemsize for name in names)
