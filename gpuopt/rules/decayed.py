"""Rules with weight decay: made of any rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from gpuopt.rules.derived import DerivedRule
from gpuopt.rules.update_rule import UpdateRule


@cache
def decayed(base: UpdateRule) -> DerivedRule:
    """Returns the rule that does `var -= weight_decay * var`, and then what `base` does.

    What `base` sums does not depend on the decay. It has the slots of `base`, and the scalar
    `weight_decay` after those of `base`.
    """

    def apply(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> None:
        var -= weight_decay * var
        base.apply(var, grad, *slots, **scalars)

    def terms(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> Sequence[Any]:
        assert base.terms is not None, "it has sums"
        return base.terms(var, grad, *slots, **scalars)

    apply.__name__ = f"decayed_{base.name}"
    apply.__module__ = base.apply.__module__
    cuda = base.cuda and replace(base.cuda, functor=f"gpuopt::Decayed<{base.cuda.functor}>")
    scalars = (*base.scalars, "weight_decay")
    return DerivedRule(
        apply,
        base.slots,
        scalars,
        cuda,
        base.squares,
        base.sums,
        terms if base.sums else None,
        base.row_slots,
        base=base,
        header="shared/decayed.cuh",
    )
