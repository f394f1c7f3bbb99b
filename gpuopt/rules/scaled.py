"""Rules of steps that a device may leave out: their scalars are those of its own count of steps."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.clipped import clip
from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def unscale(grad: Any, *, clip_factor: Any, clip_bound: Any) -> None:
    """Divides the gradient by the loss scale, and clips it; the factor does both."""
    clip(grad, clip_factor=clip_factor, clip_bound=clip_bound)


_UNSCALING = Stage("scaled", unscale, of_counts=True, is_measured=True)


def scaled(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `clipped(base)` does, with the same scalars.

    Kernels choose among the scalars of several counts of steps.
    """
    return staged(base, _UNSCALING)
