"""Moving averages: a rule whose variable is an average, and a stage for one of the variable."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule, update_rule

# The weight of the new value: 1 minus that of the old average.
AVERAGE_WEIGHT = "average_weight"


def follow(average: Any, value: Any, weight: Any) -> None:
    """Moves an average in place."""
    average -= (average - value) * weight


@update_rule
def moving_average(var: Any, grad: Any, *, average_weight: Any) -> None:
    """Moves an average, which is the variable, towards a value."""
    follow(var, grad, average_weight)


def move_average(var: Any, _average: Any, *, average_weight: Any) -> None:
    """Moves the average towards the stored variable."""
    follow(_average, var, average_weight)


_AVERAGE = Stage("averaged", move_average, slots=("_average",))


def averaged(base: UpdateRule, stored: np.dtype[Any] | None = None) -> StagedRule:
    """Returns the rule that does what `base` does, and moves an average towards the new variable.

    It has the slot `_average` before those of `base`, as slots of rows are the last ones, and the
    scalar `average_weight` after its scalars: one less the weight of the old average.

    Args:
        base: The rule that updates the variable.
        stored: The type that the variable is rounded to, if it is not the one that rules compute
            in: so is what the average follows. Kernels know it by themselves.
    """
    return staged(base, _AVERAGE, stored)
