"""Which numbers of a step follow from the count of steps alone: a GPU can count by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gpuopt.optimizers.base.clipping import CLIPPING
from gpuopt.optimizers.base.hyperparameters import Hyperparameters, WithAllDigits
from gpuopt.step.averages import FollowingAverages
from gpuopt.step.step_numbers import FollowsSteps
from gpuopt.step.updates import Updates
from gpuopt.variables.variable import Variable


class Unknown(NamedTuple):
    """A part of a step that the host alone can compute, once it knows which steps were made.

    Attributes:
        what: Names it, for an error.
        instead: What a GPU can do by itself.
    """

    what: str
    instead: str


def unknown_hyperparameter(
    every: Iterable[Hyperparameters], counter: Variable | None
) -> Unknown | None:
    """Returns the first hyperparameter that does not follow from a counter alone; or None.

    Args:
        every: An optimizer's, and those of its groups.
        counter: What counts the steps; None if nothing does.
    """
    changing = (each for each in every if each.changing)
    return next((found for each in changing for found in _unknown(each, counter)), None)


def unknown_beside(
    following: FollowingAverages | None, updates: Updates, counter: Variable | None
) -> Unknown | None:
    """Returns what the host has to compute beside the update, if that is Python's; or None.

    Args:
        following: The averages that the optimizer moves.
        updates: The step's.
        counter: See `unknown_hyperparameter`.
    """
    for variable in updates.variables():
        if variable.constraint is not None:
            return Unknown(
                f'the constraint of "{variable.name}" is {_named(variable.constraint)}',
                "a variable without a constraint, which is projected by hand where that is due",
            )
    if following is None or following.moving.follows(counter):
        return None
    return Unknown(
        f"the decay of averages (of {type(following.moving).__name__}) follows from more than a "
        "number or the step's global_step",
        "an ExponentialMovingAverage whose num_updates is None, a number or the global_step",
    )


def _unknown(hyperparameters: Hyperparameters, counter: Variable | None) -> Iterator[Unknown]:
    for name, value in hyperparameters.changing.items():
        given = value.given if isinstance(value, WithAllDigits) else value
        if not (isinstance(given, FollowsSteps) and given._is_ours):
            instead = "a number, or a schedule of gpuopt that follows the step's global_step"
            what = _named(given)
        elif name in CLIPPING:
            instead, what = "a number", f"a schedule, {given.name}"
        elif counter is None or given.global_step.identity is not counter.identity:
            instead = "one that follows the step's global_step"
            counts = "the step has none" if counter is None else f'global_step is "{counter.name}"'
            what = f'{given.name} of "{given.global_step.name}", and {counts}'
        else:
            continue
        yield Unknown(f"{hyperparameters.whose}{name} is {what}", instead)


def _named(value: Any) -> str:
    """Names a value that is not known before somebody asks for it."""
    if isinstance(value, FollowsSteps):
        return f"a schedule of the subclass {type(value).__name__}"
    if callable(value):
        return f"the Python function {getattr(value, '__qualname__', type(value).__name__)}"
    return f'the variable "{value.name}"' if isinstance(value, Variable) else "an array"
