"""Clipping, as a stage: each element of the gradient is clipped as it is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def clip(grad: Any, *, clip_factor: Any, clip_bound: Any) -> None:
    """Makes the gradient smaller, and each element no farther from 0 than the bound."""
    grad[...] = np.clip(grad * clip_factor, -clip_bound, clip_bound)


_CLIPPING = Stage("clipped", clip, is_measured=True)
CLIP_SCALARS = _CLIPPING.scalars


def clipped(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `base` does with a clipped gradient.

    That is the gradient times `clip_factor`, and then no farther from 0 than `clip_bound`. NaN
    stays. The rule has the slots of `base`, and these two scalars after those of `base`.
    """
    return staged(base, _CLIPPING)
