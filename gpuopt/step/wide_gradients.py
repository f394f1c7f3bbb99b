"""float32 gradients of 16-bit variables: sums, or divided by a loss scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


def wide_dtype(variable: Variable) -> np.dtype[Any]:
    """Returns the dtype that rules compute in, in which gradients are summed."""
    return np.dtype(compute_type(variable.dtype))


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
