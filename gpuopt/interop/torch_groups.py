"""torch's parameter groups, as arguments of gpuopt's optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from gpuopt.optimizer import Optimizer
from gpuopt.optimizers.base import ParameterGroup
from gpuopt.optimizers.base.declared import OTHER_NAMES
from gpuopt.state.slot_codecs import SlotDtype
from gpuopt.variables.variable import Variable

Array = np.ndarray[Any, Any]
Settings = Mapping[str, Any]
States = list[dict[str, Array]]
# An optimizer, its slots by name, one for each variable, and its other variables.
Imported = tuple[Optimizer, dict[str, list[Array]], dict[str, Array]]


class Part(NamedTuple):
    """One of torch's parameter groups.

    Attributes:
        settings: torch's.
        states: Those of its parameters.
        variables: Theirs.
        slot_dtype: Of the slots of all parts; None if they have the types of the variables.
    """

    settings: Settings
    states: States
    variables: list[Variable]
    slot_dtype: SlotDtype | None = None


def parts_of(
    groups: Sequence[Settings],
    states: Iterable[dict[str, Array]],
    variables: Iterable[Variable],
    slot_dtype: SlotDtype | None = None,
) -> list[Part]:
    """Returns torch's parameter groups, with the states and variables of their parameters."""
    states, variables = iter(states), iter(variables)
    sizes = [len(group["params"]) for group in groups]
    return [
        Part(group, list(islice(states, size)), list(islice(variables, size)), slot_dtype)
        for group, size in zip(groups, sizes, strict=True)
    ]


def step_of(parts: Sequence[Part]) -> int:
    """Returns the number of steps of all parameters that were trained.

    Raises:
        ValueError: they have made different numbers of steps.
    """
    steps = {int(state["step"]) for part in parts for state in part.states if state} or {0}
    if len(steps) > 1:
        raise ValueError(
            f"torch's parameters are at steps {sorted(steps)}; gpuopt counts those of all as one"
        )
    return steps.pop()


def numbers_of(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Returns gpuopt's hyperparameters of some names from torch's settings."""
    numbers = {}
    for name in names:
        setting, index = setting_of(name)
        value = settings[setting]
        # All digits, also of a scalar of torch's.
        numbers[name] = np.float64(float(value if index is None else value[index]))
    return numbers


def settings_of(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Returns torch's settings from gpuopt's hyperparameters."""
    settings: dict[str, Any] = {}
    for name, number in numbers.items():
        setting, index = setting_of(name)
        settings[setting] = number if index is None else (*settings.get(setting, ()), number)
    return settings


def setting_of(name: str) -> tuple[str, int | None]:
    """Returns torch's name of a hyperparameter, and its place if it is one of several."""
    setting, _, index = OTHER_NAMES.get(name, (name,))[0].rstrip("]").partition("[")
    return setting, int(index) if index else None


def shared(name: str, groups: Sequence[Settings]) -> bool:
    """Returns a setting that chooses the formula.

    Raises:
        ValueError: the groups differ in it.
    """
    found = {bool(settings[name]) for settings in groups}
    if len(found) > 1:
        raise ValueError(
            f"torch's parameter groups differ in {name}, which chooses the formula: import each "
            "group into an optimizer of its own"
        )
    return found.pop()


def arguments_of(numbers: Sequence[Mapping[str, Any]], parts: Sequence[Part]) -> dict[str, Any]:
    """Returns arguments of an optimizer: a group for each part but the first.

    A group gets those hyperparameters that differ from the first's.
    """
    own, *others = numbers
    groups = [
        ParameterGroup(
            variables=part.variables,
            **{name: value for name, value in given.items() if value != own[name]},
        )
        for given, part in zip(others, parts[1:], strict=True)
    ]
    return {**own, "groups": groups, "slot_dtype": parts[0].slot_dtype}


def name_of(part: Part) -> str:
    """Returns what the part's `ParameterGroup` is called."""
    return part.variables[0].name


def counts_of(parts: Sequence[Part], key: str, start: np.generic) -> list[Array]:
    """Returns one count for each variable; what it starts with where torch has none yet."""
    return [np.array(type(start)(state.get(key, start))) for part in parts for state in part.states]


def values_of(parts: Sequence[Part], key: str) -> list[Array]:
    """Returns one state array for each variable; zeros where torch has not made it yet."""
    return [
        state[key]
        if state.get(key) is not None
        else np.zeros(variable.shape, part.slot_dtype or variable.dtype)
        for part in parts
        for state, variable in zip(part.states, part.variables, strict=True)
    ]
