"""Rules of steps that a device may leave out: their scalars are those of its own count of steps."""

from __future__ import annotations

from functools import cache

from gpuopt.rules.clipped import clipped
from gpuopt.rules.staged import StagedRule, marked
from gpuopt.rules.update_rule import UpdateRule


@cache
def scaled(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `clipped(base)` does, with the same scalars.

    Kernels choose among the scalars of several counts of steps.
    """
    return marked(clipped(base), "scaled", is_scaled=True)
