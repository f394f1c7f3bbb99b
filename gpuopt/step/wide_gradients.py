"""Gradients in float32 for variables of 16 bits: sums of others, which are not rounded before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


class _ThisThread(threading.local):
    """What steps of this thread take.

    Attributes:
        takes_wide: Whether a gradient may have the type that rules compute in.
    """

    takes_wide = False


this_thread = _ThisThread()


def wide_dtype(variable: Variable) -> np.dtype[Any]:
    """Returns the dtype that rules compute in, in which gradients are summed."""
    return np.dtype(compute_type(variable.dtype))


def is_taken_wide(dtype: np.dtype[Any], variable: Variable) -> bool:
    """Whether a gradient of another dtype than its variable's may be of this one."""
    return this_thread.takes_wide and dtype == wide_dtype(variable)


def narrowed(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of its variable's dtype: a rounded copy, unless it has that dtype."""
    if isinstance(gradient, IndexedSlices):
        values = narrowed(gradient.values, variable)
        return gradient.replace(values, gradient.indices, variable.shape)
    if gradient is None or gradient.dtype == variable.dtype:
        return gradient
    with backend_for(variable.device).enter():
        return gradient.astype(variable.dtype)
