"""Refuses a new rule whose sums do not have the degrees that it declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpuopt.rules.update_rule import UpdateRule


def refuse_other_degrees(rule: UpdateRule) -> None:
    """Compares what a rule sums of a gradient, and of twice as much beside other slots."""
    var, grad = np.array([0.5, 2.0, -1.0, 10.0]), np.array([-50.0, -0.25, 0.75, 3.0])
    with np.errstate(all="ignore"):
        try:
            once, twice = (
                _terms(rule, var, times * grad, np.full_like(var, other))
                for times, other in ((1, 0.25), (2, 3.0))
            )
        except Exception:
            return
    for name, degree, mine, doubled in zip(rule.sums, rule.degrees, once, twice, strict=True):
        if not np.allclose(doubled, 2.0**degree * mine, rtol=1e-9, atol=0):
            raise ValueError(
                f"{rule.name} sums what is not of degree {degree} in the gradient alone, as "
                f"degrees={rule.degrees} says of {name}: of twice the gradient, and of other slots "
                f"and scalars, terms are {doubled} for {mine}. Give its degree, or no degrees"
            )


def _terms(rule: UpdateRule, var: Any, grad: Any, others: Any) -> Sequence[Any]:
    assert rule.terms is not None, "it has sums"
    slots = [others.copy() for _ in rule.slots]
    scalars = {name: others[0] for name in rule.scalars if name not in rule.sums}
    scalars |= dict.fromkeys(rule.sums, np.float64(0))
    return rule.terms(var, grad, *slots, **scalars)
