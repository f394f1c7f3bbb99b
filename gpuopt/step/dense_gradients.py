"""Sparse gradients as dense ones, for rules that sum over whole variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import SparseUpdate, compute_type
from gpuopt.rules.gradient_descent import gradient_descent
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


def as_dense(
    backend: Backend,
    slices: IndexedSlices,
    variable: Variable,
    dtype: np.dtype[Any],
    refused: Any,
) -> Any:
    """Returns a gradient of a variable's shape and device; the host does not wait for it.

    Repeated rows are summed as in a sparse update, and then rounded to the dtype.

    Args:
        backend: The device's.
        slices: On the device.
        variable: What they are the gradient of.
        dtype: The result's: the variable's, or its slots'.
        refused: See `Backend.apply_sparse`.
    """
    with backend.enter():
        dense = backend.xp.zeros(variable.shape, dtype)
    plan = backend.plan_dense([Target(dense, [])])
    to_add = {"learning_rate": compute_type(dtype)(-1)}
    update = SparseUpdate(plan, slices.values, slices.indices)
    backend.apply_sparse(gradient_descent, [update], [to_add], other_rows=None, refused=refused)
    return dense
