"""The types of an update's arrays, where they are not all the same."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuopt.backends.cuda.parameters import CPP_TYPES, name_of
from gpuopt.codecs import Codecs


class Mixed(NamedTuple):
    """The types of an update's arrays; see kernels/shared/program.cuh.

    Attributes:
        var: numpy's name of the variable's.
        slots: That of all slots.
        gradient: The gradient's.
        companion: That of the companion, see `Target`; "" if there is none.
    """

    var: str
    slots: str
    gradient: str
    companion: str = ""


# The type of the remainder of a variable that is the upper half of its master copy.
SPLIT = "uint16"

# The types that a kernel is compiled for: the name of the only one, or several.
Storage: TypeAlias = str | Mixed


def storage_of(codecs: Codecs, gradient: np.dtype[Any]) -> Storage:
    """Returns the types that a kernel is compiled for, where gradients have this dtype."""
    var, *companion = map(name_of, codecs.var.dtypes)
    slots = name_of(slot_dtype(codecs))
    if name_of(gradient) == var == slots and not companion:
        return var
    return Mixed(var, slots, name_of(gradient), *companion)


def slot_dtype(codecs: Codecs) -> np.dtype[Any]:
    """Returns the dtype of slots that are not in 8 bits; the variable's if there are none."""
    # The last: an average, which is the first, may have the variable's type.
    has_one = codecs.slots and not codecs.per_block
    return (codecs.slots[-1] if has_one else codecs.var).dtypes[0]


def cpp_types(storage: Storage) -> dict[str, str]:
    """Returns the types of C++ that a program stores its arrays in, by their names there."""
    var, slots, gradient, companion = (
        (storage, storage, storage, "") if isinstance(storage, str) else storage
    )
    kept = "Alone"
    if companion:
        kept = "Split" if companion == SPLIT else f"Copied<{CPP_TYPES[companion]}>"
    return {
        "Var": CPP_TYPES[var],
        "Slot": CPP_TYPES[slots],
        "Gradient": CPP_TYPES[gradient],
        "Companion": f"gpuopt::{kept}",
    }


def real_of(storage: Storage) -> str:
    """Returns what a rule computes in."""
    return "float64" if storage == "float64" else "float32"


def num_companions(storage: Storage) -> int:
    """Returns how many companions a variable has."""
    return int(isinstance(storage, Mixed) and bool(storage.companion))


def element_bytes(storage: Storage) -> int:
    """Returns the size of an element of the widest type: packs have as many of these as fit."""
    names = (storage,) if isinstance(storage, str) else storage[:-1]
    return max(np.dtype(name).itemsize for name in names)
