"""Rules that also move an average of the variable: made of any rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.rules.derived import DerivedRule, derive
from gpuopt.rules.moving_average import AVERAGE_WEIGHT, follow
from gpuopt.rules.update_rule import UpdateRule


@cache
def averaged(base: UpdateRule, stored: np.dtype[Any] | None = None) -> DerivedRule:
    """Returns the rule that does what `base` does, and moves an average towards the new variable.

    It has the slot `average` before those of `base`, as slots of rows are the last ones, and the
    scalar `average_weight` after its scalars: one less the weight of the old average.

    Args:
        base: What updates the variable.
        stored: The type that the variable is rounded to, if it is not the one that rules compute
            in: so is what the average follows. Kernels know it by themselves.
    """

    def averaged(
        var: Any, grad: Any, average: Any, *slots: Any, average_weight: Any, **scalars: Any
    ) -> None:
        base.apply(var, grad, *slots, **scalars)
        value = var if stored is None else var.astype(stored).astype(var.dtype)
        follow(average, value, average_weight)

    def terms(
        var: Any, grad: Any, average: Any, *slots: Any, average_weight: Any, **scalars: Any
    ) -> Sequence[Any]:
        assert base.terms is not None, "it has sums"
        return base.terms(var, grad, *slots, **scalars)

    return derive(
        DerivedRule,
        base,
        averaged,
        terms,
        header="shared/averaged.cuh",
        slots=("average",),
        scalars=(AVERAGE_WEIGHT,),
        is_averaged=True,
        stored=stored,
    )
