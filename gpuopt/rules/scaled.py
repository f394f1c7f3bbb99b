"""Unscaling, as a stage: gradients of a scaled loss are divided by its scale as they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuopt.rules.stage import UNSCALED, Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def divide_by_scale(grad: Any, *, unscale: Any) -> None:
    """Multiplies the gradient by the reciprocal of the loss scale."""
    grad *= unscale


_UNSCALING = Stage(UNSCALED, divide_by_scale, is_measured=True)
# A device that decides about steps knows the scale: then the scalar is 0 for kernels.
_DECIDED = replace(_UNSCALING, has_device_count=True)
[UNSCALE] = _UNSCALING.scalars


def scaled(base: UpdateRule, *, of_counts: bool = True) -> StagedRule:
    """Returns the rule that does what `base` does with an unscaled gradient.

    It has the slots of `base`, and the scalar `unscale` after those of `base`.

    Args:
        base: The rule.
        of_counts: Whether a device may leave the step out, and so chooses among the scalars of
            several counts of steps.
    """
    return staged(base, _DECIDED if of_counts else _UNSCALING)
