"""Rules that clip their gradient: made of any rule, in both of its forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.rules.derived import DerivedRule, derive
from gpuopt.rules.update_rule import UpdateRule

# In the order of the functor's.
CLIP_SCALARS = ("clip_factor", "clip_bound")


class ClippedRule(DerivedRule):
    """A rule that clips each element of the gradient as it reads it."""

    def gradient(self, grad: Any, scalars: Mapping[str, Any]) -> Any:
        return _clipped(grad, *(scalars[name] for name in CLIP_SCALARS))


@cache
def clipped(base: UpdateRule) -> ClippedRule:
    """Returns the rule that does what `base` does with a clipped gradient.

    That is the gradient times `clip_factor`, and then no farther from 0 than `clip_bound`. NaN
    stays. The rule has the slots of `base`, and these two scalars after those of `base`.
    """

    def clipped(
        var: Any, grad: Any, *slots: Any, clip_factor: Any, clip_bound: Any, **scalars: Any
    ) -> None:
        base.apply(var, _clipped(grad, clip_factor, clip_bound), *slots, **scalars)

    def terms(
        var: Any, grad: Any, *slots: Any, clip_factor: Any, clip_bound: Any, **scalars: Any
    ) -> Sequence[Any]:
        assert base.terms is not None, "it has sums"
        return base.terms(var, _clipped(grad, clip_factor, clip_bound), *slots, **scalars)

    return derive(
        ClippedRule, base, clipped, terms, header="shared/clipped.cuh", scalars=CLIP_SCALARS
    )


def _clipped(grad: Any, factor: Any, bound: Any) -> Any:
    return np.clip(grad * factor, -bound, bound)
