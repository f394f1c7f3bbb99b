"""Rules with weight decay: made of any rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

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

    return _derived(base, decayed)


@cache
def decayed_rows(base: UpdateRule) -> DerivedRule:
    """Returns the rule that does what `decayed(base)` does, but where the gradient is -0.

    There, nothing decays. It is for a sparse gradient that is made dense: -0 stands in the rows
    that it does not name, and nowhere else.
    """

    def decayed_rows(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> None:
        is_named = (grad != 0) | ~np.signbit(grad)
        var[...] = np.where(is_named, var - weight_decay * var, var)
        base.apply(var, grad, *slots, **scalars)

    return _derived(base, decayed_rows)


def _derived(base: UpdateRule, apply: Callable[..., None]) -> DerivedRule:
    def terms(var: Any, grad: Any, *slots: Any, weight_decay: Any, **scalars: Any) -> Sequence[Any]:
        assert base.terms is not None, "it has sums"
        return base.terms(var, grad, *slots, **scalars)

    return derive(
        DerivedRule, base, apply, terms, header="shared/decayed.cuh", scalars=("weight_decay",)
    )
