"""clip_gradients_by_global_norm: contrib's clipping for several tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuopt.clipping import clip_by_global_norm
from gpuopt.step.pairs import Gradient, as_pairs, as_sequence, checked_gradient, unpack_pair
from gpuopt.step.wide_gradients import GradientTypes
from gpuopt.variables.operators import reading
from gpuopt.variables.variable import FLOAT_DTYPES
from gpuopt.wrappers.base import checked_number


def clip_gradients_by_global_norm(
    gradients_variables: Iterable[tuple[Any, Any]], clip_norm: float = 20.0
) -> tuple[list[tuple[Gradient | None, Any]], Any]:
    """Scales gradients down so that the norm of all of them together is at most `clip_norm`.

    Each is multiplied by `clip_norm / max(global_norm, clip_norm)`. Zero gradients, as those of
    other tasks, stay zero, so that `MultitaskOptimizerWrapper` leaves their variables alone. If a
    gradient holds NaN or infinity, all become NaN, as in TensorFlow. The host waits for a GPU
    only where variables are on the CPU, too.

    Args:
        gradients_variables: (gradient, variable) pairs, as of `compute_gradients`. Gradients are
            only read.
        clip_norm: The largest norm that is kept.

    Returns:
        The pairs, with gradients of the same types, and None where it was given; and the norm
        before clipping, a scalar in float32, or float64 if a gradient is: on the first GPU that a
        variable is on, or else the CPU.

    Raises:
        TypeError, ValueError: `clip_norm` is no number above 0; or what
            `Optimizer.apply_gradients` raises for a pair.
    """
    checked_number("clip_norm", clip_norm)
    if not 0 < clip_norm < np.inf:
        raise ValueError(f"clip_norm must be above 0 and finite, got {clip_norm!r}")
    given = as_pairs(as_sequence(gradients_variables))
    unpacked = [unpack_pair(position, pair) for position, pair in enumerate(given)]
    gradients = [
        None
        if gradient is None
        else checked_gradient(gradient, variable, FLOAT_DTYPES, GradientTypes.WIDE)
        for gradient, variable in unpacked
    ]
    if not [gradient for gradient in gradients if gradient is not None]:
        return given, np.float32(0)
    with reading(*(gradient for gradient, _ in unpacked)):
        clipped, norm = clip_by_global_norm(gradients, clip_norm)
    return [(gradient, pair[1]) for gradient, pair in zip(clipped, given, strict=True)], norm
