"""Rules of steps that a device may leave out: their scalars are those of its own count of steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from gpuopt.rules.clipped import ClippedRule, clipped
from gpuopt.rules.derived import derive
from gpuopt.rules.update_rule import UpdateRule


class ScaledRule(ClippedRule):
    """A clipped rule whose kernels choose among the scalars of several counts of steps."""


@cache
def scaled(base: UpdateRule) -> ScaledRule:
    """Returns the rule that does what `clipped(base)` does, with the same scalars."""
    rule = clipped(base)

    def scaled(*arrays: Any, **scalars: Any) -> None:
        rule.apply(*arrays, **scalars)

    def terms(*arrays: Any, **scalars: Any) -> Sequence[Any]:
        assert rule.terms is not None, "it has sums"
        return rule.terms(*arrays, **scalars)

    return derive(ScaledRule, rule, scaled, terms, header="shared/scaled.cuh")
