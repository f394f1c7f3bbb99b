"""What an optimizer hands over to torch, and how it is read from its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.state.state_dict import OptimizerState
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable

Array = np.ndarray[Any, Any]
States = list[dict[str, Array]]
# A group's hyperparameters.
Given = Mapping[str, Any]
# The name of torch's optimizer, its settings, and the state of each parameter.
Exported = tuple[str, dict[str, Any], States]


def read_numbers(given: Given, names: list[str]) -> dict[str, float]:
    """Returns hyperparameters, rounded as gpuopt's steps round them."""
    numbers = {}
    for name in names:
        value = given[name]
        if callable(value):
            raise ValueError(f"{name} is a function; torch's settings are numbers")
        numbers[name] = float(as_scalar(value, name))
    return numbers


def names_with_slots(
    state: OptimizerState, slot_name: str, variables: Mapping[str, Variable]
) -> list[str]:
    """Returns all names in `variables` if each has the slot, and [] if none has it."""
    present = state["slots"].get(slot_name, {})
    missing = [name for name in variables if name not in present]
    if present and missing:
        names = [variables[name].name for name in missing]
        raise ValueError(f'{names} have no slot "{slot_name}" yet, but other variables have one')
    return list(variables) if present else []


def refuse_options(optimizer: Any) -> None:
    """Raises ValueError for an optimizer with state that torch's optimizers cannot have."""
    for name, option in optimizer._given_options.items():
        if option.in_torch:
            raise ValueError(f'"{optimizer.get_name()}" has {name}, and {option.in_torch}')
