"""Caution, as a stage: steps against the gradient's sign alone (Liang et al. 2024).

It is for rules whose step does not depend on the variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule

# The least part of the elements that a step is divided by.
_LEAST_MEAN = 1e-3


def make_agreeing_step(var: Any, grad: Any, step: Any, *, agreeing: Any, elements: Any) -> None:
    """Makes the step where it agrees, longer by as much as others are left out."""
    factor = 1 / np.maximum(agreeing / elements, step.dtype.type(_LEAST_MEAN))
    var += step * np.where(_agrees(grad, step), factor, step.dtype.type(0))


def count_agreeing(grad: Any, step: Any) -> Sequence[Any]:
    """Returns 1 where the step agrees and 0 where not, and 1 everywhere."""
    agrees = _agrees(grad, step).astype(step.dtype)
    return agrees, np.ones_like(agrees)


def _agrees(grad: Any, step: Any) -> Any:
    """Returns where a step goes against the gradient's sign."""
    return np.sign(step) * grad < 0


_CAUTION = Stage(
    "cautious",
    make_agreeing_step,
    sums=("agreeing", "elements"),
    terms=count_agreeing,
)


def cautious(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `base` does where this goes against the gradient's sign.

    Elsewhere the variable stays. Steps are divided by the part of the elements that move, or 0.001
    if it is less. It has the slots of `base`, and two sums after its scalars.

    Raises:
        ValueError: `base` has sums or slots of rows.
    """
    if base.computed:
        has = f"row_slots={base.row_slots}" if base.row_slots else f"sums={base.sums}"
        raise ValueError(
            f"cautious=True cannot be had with the rule {base.name} of {base.apply.__module__}, "
            f"which has {has}: which elements move would be counted before its step is known. "
            "Leave cautious=True out, or give the optimizer another rule"
        )
    return staged(base, _CAUTION)
