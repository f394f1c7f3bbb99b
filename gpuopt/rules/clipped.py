"""Clipping, as two stages: to a value and to a norm, as each element of the gradient is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.rules.stage import CLIPPED, Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule


def clip_by_value(grad: Any, *, clip_bound: Any) -> None:
    """Leaves no element farther from 0 than the bound; NaN stays."""
    grad[...] = np.clip(grad, -clip_bound, clip_bound)


def clip_by_norm(grad: Any, *, clip_factor: Any) -> None:
    """Multiplies the gradient by the factor that its norm gives."""
    grad *= clip_factor


_BOUND = Stage("bounded", clip_by_value, is_measured=True)
_CLIPPING = Stage(CLIPPED, clip_by_norm, is_measured=True)
[CLIP_BOUND], [CLIP_FACTOR] = _BOUND.scalars, _CLIPPING.scalars


def bounded(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `base` does with a gradient that is clipped to a value."""
    return staged(base, _BOUND)


def clipped(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `base` does with a gradient that is clipped to a norm."""
    return staged(base, _CLIPPING)
