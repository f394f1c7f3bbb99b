"""The rule by which averages are moved: the variable is an average, and the gradient the value."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.update_rule import update_rule

# One less the weight of the old average.
AVERAGE_WEIGHT = "average_weight"


def follow(average: Any, value: Any, weight: Any) -> None:
    """Moves an average in place."""
    average -= (average - value) * weight


@update_rule
def moving_average(var: Any, grad: Any, *, average_weight: Any) -> None:
    """Moves an average, which is the variable, towards a value."""
    follow(var, grad, average_weight)
