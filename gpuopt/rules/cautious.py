"""Cautious rules: made of any rule whose step does not depend on the variable, in both forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.rules.derived import DerivedRule, derive
from gpuopt.rules.update_rule import UpdateRule

# The least part of the elements that a step is divided by.
_LEAST_MEAN = 1e-3


@cache
def cautious(base: UpdateRule) -> DerivedRule:
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

    def step_of(var: Any, grad: Any, slots: Sequence[Any], scalars: dict[str, Any]) -> Any:
        """Returns the step, and 1 where it is made and 0 where not."""
        step = np.zeros_like(var)
        base.apply(step, grad, *slots, **scalars)
        return step, (np.sign(step) * grad < 0).astype(var.dtype)

    def cautious(
        var: Any, grad: Any, *slots: Any, agreeing: Any, elements: Any, **scalars: Any
    ) -> None:
        step, agrees = step_of(var, grad, slots, scalars)
        var += step * (agrees / np.maximum(agreeing / elements, var.dtype.type(_LEAST_MEAN)))

    def terms(
        var: Any, grad: Any, *slots: Any, agreeing: Any, elements: Any, **scalars: Any
    ) -> Sequence[Any]:
        copies = [slot.copy() for slot in slots]
        _, agrees = step_of(var, grad, copies, scalars)
        return agrees, np.ones_like(agrees)

    sums = ("agreeing", "elements")
    return derive(
        DerivedRule,
        base,
        cautious,
        terms,
        header="shared/cautious.cuh",
        scalars=sums,
        sums=sums,
    )
