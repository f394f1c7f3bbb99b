"""Rules with weight decay: made of any rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from gpuopt.rules.derived import DerivedRule, derive
from gpuopt.rules.update_rule import UpdateRule


@cache
def decayed(base: UpdateRule) -> DerivedRule:
    """Returns the rule that does `var -= weight_decay * var`, and then what `base` does.

    What `base` sums does not depend on the decay. It has the slots of `base`, and the scalar
    `weight_decay` after those of `base`.
    """

    def decayed(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> None:
        var -= weight_decay * var
        base.apply(var, grad, *slots, **scalars)

    def terms(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> Sequence[Any]:
        assert base.terms is not None, "it has sums"
        return base.terms(var, grad, *slots, **scalars)

    return derive(
        DerivedRule, base, decayed, terms, header="shared/decayed.cuh", scalars=("weight_decay",)
    )
