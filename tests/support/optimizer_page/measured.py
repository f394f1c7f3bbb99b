"""What an optimizer keeps for a variable, and what its sparse step writes: found by steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from array_slots import array_slots
from optimizer_page.exports import make

import gpuopt
from gpuopt.optimizers.base import RuleOptimizer

_SHAPE = (6, 4)
_NAMED = [1, 4]


class Measured(NamedTuple):
    """The state of one float32 variable after some steps.

    Attributes:
        slots: The number of elements of each slot, and the bytes of an element.
        others: The names of the variables that all variables share.
        counts: The names of slots that count the variable's steps.
        written: The rows that a sparse step writes, by the slot's name; of the variable, by "".
        num_parameters, num_rows: Of the variable.
    """

    slots: Mapping[str, tuple[int, int]]
    others: tuple[str, ...]
    counts: tuple[str, ...]
    written: Mapping[str, tuple[int, ...]]
    num_parameters: int = _SHAPE[0] * _SHAPE[1]
    num_rows: int = _SHAPE[0]


def measure(optimizer: type[RuleOptimizer], settings: Mapping[str, Any]) -> Measured:
    """Makes dense steps and then a sparse one.

    Args:
        optimizer: The class.
        settings: Arguments, beside those without a default.
    """
    rng = np.random.default_rng(3)
    variable = gpuopt.Variable(rng.normal(size=_SHAPE).astype(np.float32), name="w")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    made = make(optimizer, settings, step)
    for _ in range(3):
        gradient = rng.normal(size=_SHAPE).astype(np.float32)
        made.apply_gradients([(gradient, variable)], global_step=step)
    slots = {name: made.get_slot(variable, name) for name in array_slots(made)}
    arrays = {"": variable, **slots}
    before = {name: array.numpy().copy() for name, array in arrays.items()}
    rows = rng.normal(size=(len(_NAMED), *_SHAPE[1:])).astype(np.float32)
    gradient = gpuopt.IndexedSlices(rows, _NAMED)
    made.apply_gradients([(gradient, variable)], global_step=step)
    counts = [made.state.slot(variable, name) for name in made.own_counts]
    of_variable = {id(slot) for slot in (*slots.values(), *counts)}
    return Measured(
        {name: (slot.size, slot.dtype.itemsize) for name, slot in slots.items()},
        tuple(each.name for each in made.variables() if id(each) not in of_variable),
        tuple(made.own_counts),
        {name: _changed_rows(before[name], array.numpy()) for name, array in arrays.items()},
    )


def _changed_rows(before: np.ndarray, after: np.ndarray) -> tuple[int, ...]:
    axes = tuple(range(1, before.ndim))
    return tuple(np.flatnonzero(np.any(before != after, axis=axes)).tolist())


def bytes_of_state(measured: Measured) -> str:
    """Says how large the slots are: "8", or "4 and 4 a row"."""
    per_parameter = per_row = 0
    for elements, size in measured.slots.values():
        if elements == measured.num_parameters:
            per_parameter += size
        else:
            assert elements == measured.num_rows, "a slot has a number for each element or row"
            per_row += size
    parts = [str(per_parameter)] if per_parameter or not per_row else []
    return " and ".join([*parts, *([f"{per_row} a row"] if per_row else [])])


def reach(measured: Measured) -> str:
    """Describes the rows that a sparse step writes: "the gradient's rows"."""
    named, every = tuple(_NAMED), tuple(range(measured.num_rows))
    in_words = {named: "the gradient's rows", every: "every row"}
    groups: dict[str, list[str]] = {}
    for name, rows in measured.written.items():
        if rows:
            groups.setdefault(in_words[rows], []).append(f"`{name}`" if name else "`w`")
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{rows} of {', '.join(names)}" for rows, names in groups.items())
