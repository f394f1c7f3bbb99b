"""Finds a gradient that holds NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.clips import DenseGradients
from gpuopt.device import Device
from gpuopt.quietly import quietly
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable


def first_nonfinite(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity; None if all are finite.

    The host waits once for each device: for the sum of all squares, which is finite if all are,
    unless they are too large. Only then are gradients looked at one by one.
    """
    by_device: dict[Device, list[tuple[Any, Variable]]] = {}
    every = []
    for gradient, variable in grads_and_vars:
        values = _values_of(gradient)
        every.append((values, variable))
        by_device.setdefault(variable.device, []).append((values, variable))
    looked_at = {
        device
        for device, here in by_device.items()
        if not _have_finite_squares(device, [values for values, _ in here])
    }
    return describe_first((values, v) for values, v in every if v.device in looked_at)


def describe_first(grads_and_vars: Iterable[tuple[Gradient, Variable]]) -> str | None:
    """Describes the first gradient that holds NaN or infinity; looks at one after the other."""
    for gradient, variable in grads_and_vars:
        found = _describe(_values_of(gradient), variable)
        if found is not None:
            return found
    return None


def describe_first_sum(slices_and_vars: Iterable[tuple[IndexedSlices, Variable]]) -> str | None:
    """Describes the first sparse gradient whose equal rows add up to NaN or infinity.

    Args:
        slices_and_vars: Gradients that are finite themselves.
    """
    for slices, variable in slices_and_vars:
        backend = backend_for(variable.device)
        with backend.enter():
            sums, _ = quietly(partial(backend.sum_duplicate_rows, slices.values, slices.indices))
        if _describe(sums, variable) is not None:
            return f'equal rows of the gradient for "{variable.name}" add up to what is not finite'
    return None


def _values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient


def _have_finite_squares(device: Device, arrays: Sequence[Any]) -> bool:
    """Whether the sum of all squares is finite; the host waits for it."""
    backend = backend_for(device)
    by_dtype: dict[np.dtype[Any], list[Any]] = {}
    for array in arrays:
        by_dtype.setdefault(array.dtype, []).append(array)
    dense = [DenseGradients(same, [0] * len(same)) for same in by_dtype.values()]
    with backend.enter():
        sums = backend.clips.sums(dense, [], num_norms=1)
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
