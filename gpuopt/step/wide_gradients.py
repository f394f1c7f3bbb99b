"""Gradients in float32 for variables of 16 bits: sums, and what a loss scale has divided."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.step.late_sums import LateSums
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


class _ThisThread(threading.local):
    """What the next step of this thread takes.

    Attributes:
        takes_wide: The optimizer whose next step takes gradients of the type that rules compute in;
            None if none does. That step puts None there when it begins: not so steps inside it.
        late_sums: What gradients of the next step of their optimizer may lack; that step takes it.
    """

    takes_wide: Any = None
    late_sums: LateSums | None = None


this_thread = _ThisThread()


def take_late_sums(optimizer: Any) -> LateSums | None:
    """Returns what gradients of an optimizer's step, which begins, may lack."""
    late_sums = this_thread.late_sums
    if late_sums is None or late_sums.optimizer is not optimizer:
        return None
    this_thread.late_sums = None
    return late_sums


def wide_dtype(variable: Variable) -> np.dtype[Any]:
    """Returns the dtype that rules compute in, in which gradients are summed."""
    return np.dtype(compute_type(variable.dtype))


def is_taken_wide(dtype: np.dtype[Any], variable: Variable, takes_wide: bool | None) -> bool:
    """Whether a gradient of another dtype than its variable's may be of this one.

    Args:
        dtype: The gradient's.
        variable: Which it is for.
        takes_wide: Whether the step takes such; None for the next step of this thread.
    """
    if takes_wide is None:
        takes_wide = this_thread.takes_wide is not None
    return takes_wide and dtype == wide_dtype(variable)


def widened(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of `wide_dtype`: a copy, unless it has that dtype."""
    return _cast(gradient, variable, wide_dtype(variable))


def narrowed(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of its variable's dtype: a rounded copy, unless it has that dtype."""
    return _cast(gradient, variable, variable.dtype)


def _cast(gradient: Any, variable: Variable, dtype: np.dtype[Any]) -> Any:
    if isinstance(gradient, IndexedSlices):
        values = _cast(gradient.values, variable, dtype)
        return gradient.replace(values, gradient.indices, variable.shape)
    if gradient is None or gradient.dtype == dtype:
        return gradient
    backend = backend_for(variable.device)
    with backend.enter():
        copy = gradient.astype(dtype)
        backend.hold(gradient)
        return copy
