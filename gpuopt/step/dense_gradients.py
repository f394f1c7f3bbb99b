"""Sparse gradients as dense ones, for rules that sum over whole variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import Backend, Target
from gpuopt.backends.backend import SparseUpdate, compute_type
from gpuopt.backends.record import StepRecord
from gpuopt.rules.accumulation import place_sum
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

    Repeated rows are summed as in a sparse update, and then rounded to the dtype. Rows that are not
    named are -0, and no other element is: see `Stage.of_named_rows`.

    Args:
        backend: The device's.
        slices: On the device.
        variable: What they are the gradient of.
        dtype: The result's: the variable's, or its slots'.
        refused: See `StepRecord`.
    """
    with backend.enter():
        dense = backend.xp.full(variable.shape, -0.0, dtype)
    plan = backend.plan_dense([Target(dense, [])])
    update = SparseUpdate(plan, slices.values, slices.indices)
    scalars, record = {"zero": compute_type(dtype)(0)}, StepRecord(refused)
    backend.apply_sparse(place_sum, [update], [scalars], other_rows=None, record=record)
    return dense
