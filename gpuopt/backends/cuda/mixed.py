"""The types of an update's arrays, where they are not all the same."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuopt.backends.cuda.parameters import CPP_TYPES, name_of


class Mixed(NamedTuple):
    """The types of an update's arrays; see kernels/shared/program.cuh.

    Attributes:
        var: numpy's name of the variable's.
        slots: That of all slots.
        gradient: The gradient's.
        beside: That of the array beside the variable; "" if there is none.
    """

    var: str
    slots: str
    gradient: str
    beside: str = ""


# The type of what is beside a variable that is the upper half of its master copy.
SPLIT = "uint16"

# What kernels are compiled for: the name of the only type, or several.
Storage: TypeAlias = str | Mixed


class WrittenTypes(NamedTuple):
    """The dtypes of what an update writes.

    Attributes:
        var: The variable's.
        slots: Of all slots.
        beside: Of the array beside the variable; None if there is none.
    """

    var: np.dtype[Any]
    slots: np.dtype[Any]
    beside: np.dtype[Any] | None = None

    @property
    def gradients(self) -> np.dtype[Any]:
        """Of what a caller gives: the 16-bit weights' where the variable is their master copy."""
        is_copied = self.beside is not None and self.beside.name != SPLIT
        return self.beside if self.beside is not None and is_copied else self.var

    def storage(self, gradient: np.dtype[Any]) -> Storage:
        """Returns what a kernel is compiled for, where gradients have this dtype."""
        if gradient == self.var == self.slots and self.beside is None:
            return name_of(self.var)
        beside = "" if self.beside is None else name_of(self.beside)
        return Mixed(name_of(self.var), name_of(self.slots), name_of(gradient), beside)

    def item_bytes(self, num_slots: int) -> list[int]:
        """Lists the size of an element of each array: of the variable, its slots, and beside it."""
        beside = () if self.beside is None else (self.beside.itemsize,)
        return [self.var.itemsize, *[self.slots.itemsize] * num_slots, *beside]


def cpp_types(storage: Storage) -> dict[str, str]:
    """Returns the types of C++ that a program stores its arrays in, by their names there."""
    var, slots, gradient, beside = (
        (storage, storage, storage, "") if isinstance(storage, str) else storage
    )
    kept = "Alone"
    if beside:
        kept = "Split" if beside == SPLIT else f"Copied<{CPP_TYPES[beside]}>"
    return {
        "Var": CPP_TYPES[var],
        "Slot": CPP_TYPES[slots],
        "Gradient": CPP_TYPES[gradient],
        "Beside": f"gpuopt::{kept}",
    }


def real_of(storage: Storage) -> str:
    """Returns what a rule computes in."""
    return "float64" if storage == "float64" else "float32"


def num_beside(storage: Storage) -> int:
    """Returns how many arrays there are beside a variable and its slots."""
    return int(isinstance(storage, Mixed) and bool(storage.beside))


def element_bytes(storage: Storage) -> int:
    """Returns the size of an element of the widest type: packs have as many of these as fit."""
    names = (storage,) if isinstance(storage, str) else storage[:-1]
    return max(np.dtype(name).itemsize for name in names)
