"""Finds a gradient that holds NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.clips import DenseGradients, SparseGradient
from gpuopt.device import Device
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


def first_nonfinite(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity; None if all are finite.

    So are sums of equal rows, by which a variable is updated. The host waits once for each device:
    for the sum of all squares, which is finite if all are, unless they are too large. Only then are
    gradients looked at one by one.
    """
    every = list(grads_and_vars)
    by_device: dict[Device, list[tuple[Gradient, Variable]]] = {}
    for pair in every:
        by_device.setdefault(pair[1].device, []).append(pair)
    looked_at = {
        device
        for device, here in by_device.items()
        if not ignore_fp_warnings(_have_finite_squares, device, here)
    }
    return describe_first(pair for pair in every if pair[1].device in looked_at)


def describe_first(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity, or whose equal rows add up to it.

    It looks at one after the other.
    """
    for gradient, variable in grads_and_vars:
        if isinstance(gradient, IndexedSlices):
            found = _describe(gradient.values, variable) or _describe_sums(gradient, variable)
        else:
            found = _describe(gradient, variable)
        if found is not None:
            return found
    return None


def _describe_sums(slices: IndexedSlices, variable: Variable) -> str | None:
    backend = backend_for(variable.device)
    with backend.enter():
        sums, _ = ignore_fp_warnings(
            partial(backend.sum_duplicate_rows, slices.values, slices.indices)
        )
    if _describe(sums, variable) is None:
        return None
    return f'equal rows of the gradient for "{variable.name}" add up to what is not finite'


def _have_finite_squares(device: Device, here: Sequence[tuple[Gradient, Variable]]) -> bool:
    """Whether the sum of all squares is finite, of sums of equal rows; the host waits for it."""
    backend = backend_for(device)
    by_dtype: dict[np.dtype[Any], list[Any]] = {}
    sparse = []
    for gradient, variable in here:
        if isinstance(gradient, IndexedSlices):
            height = variable.shape[0]
            sparse.append(SparseGradient(gradient.values, gradient.indices, height, norm=0))
        else:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    dense = [DenseGradients(same, [0] * len(same)) for same in by_dtype.values()]
    with backend.enter():
        sums = backend.clips.sums(dense, sparse, num_norms=1)
        return bool(np.isfinite(backend.to_host(sums)).all())


def _describe(values: Any, variable: Variable) -> str | None:
    backend = backend_for(variable.device)
    with backend.enter():
        finite = backend.xp.isfinite(values)
        if backend.to_host(finite.all()):
            return None
        first = np.unravel_index(int(finite.argmin()), values.shape)
        offset = tuple(int(i) for i in first)
        return (
            f'gradient for "{variable.name}" is not finite: {values.size - int(finite.sum())} of '
            f"{values.size} values, the first is {float(values[offset])} at {list(offset)}"
        )
