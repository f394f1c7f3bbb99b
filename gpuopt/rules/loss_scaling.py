"""How a loss scale follows from steps with and without finite gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings

# The largest scale that is accepted: the reciprocal of a larger one is subnormal, and kernels flush
# it to 0.
LARGEST_SCALE = 2.0**126
# The largest scale that grows: its reciprocal times a factor of clipping down to 2^-26 is no
# subnormal number either.
LARGEST_GROWN = 2.0**100


class ScaleRule(NamedTuple):
    """How a loss scale grows and shrinks.

    Attributes:
        incr_every: After how many good steps it grows; 0 if it never changes.
        incr_ratio: Its factor then, unless the product is above `LARGEST_GROWN`.
        decr_every: After how many bad steps it shrinks.
        decr_ratio: Its factor then; it stays at least 1.
        divisor: Its divisor then.
    """

    incr_every: int = 0
    incr_ratio: float = 1.0
    decr_every: int = 1
    decr_ratio: float = 1.0
    divisor: float = 1.0


class ScaleState(NamedTuple):
    """A loss scale, and counts of the steps that it depends on.

    Attributes:
        loss_scale: float32.
        good_steps: Steps with finite gradients since the scale has changed, or since a bad one.
        bad_steps: Steps with NaN or infinity since the scale has changed.
        num_skipped: How many steps were left out.
        skipped_in_a_row: How many of them since the last one whose gradients were finite.
    """

    loss_scale: Any
    good_steps: int = 0
    bad_steps: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0


def after_step(
    state: ScaleState, rule: ScaleRule, is_finite: bool, accept_after: int | None
) -> tuple[ScaleState, bool]:
    """Returns the state after one step, and whether the step is made.

    kernels/shared/loss_scaling.cuh does the same.

    Args:
        state: Before the step.
        rule: How the scale changes.
        is_finite: Whether all gradients are.
        accept_after: After how many skipped steps in a row a step is made anyway.
    """
    scale, good, bad = scale_after(state[:3], rule, is_finite)
    in_a_row = state.skipped_in_a_row
    if is_finite or (accept_after is not None and in_a_row >= accept_after):
        return ScaleState(scale, good, bad, state.num_skipped, 0 if is_finite else in_a_row), True
    return ScaleState(scale, good, bad, state.num_skipped + 1, in_a_row + 1), False


def scale_after(
    state: tuple[Any, int, int], rule: ScaleRule, is_finite: bool
) -> tuple[Any, int, int]:
    """Returns the scale and the two counts after one step; they are the first of `ScaleState`."""
    scale, good, bad = state
    if rule.incr_every == 0:
        return scale, good, bad
    one = np.float32(1)
    if is_finite:
        if good + 1 < rule.incr_every:
            return scale, good + 1, bad
        grown = ignore_fp_warnings(np.multiply, scale, np.float32(rule.incr_ratio))
        return (grown if grown <= LARGEST_GROWN else scale), 0, 0
    if bad + 1 < rule.decr_every:
        return scale, 0, bad + 1
    shrunk = scale * np.float32(rule.decr_ratio) / np.float32(rule.divisor)
    return np.maximum(one, shrunk), 0, 0
