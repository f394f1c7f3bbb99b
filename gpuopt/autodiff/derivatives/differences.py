"""Derivatives of running sums and of differences between neighbours."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np

from gpuopt.autodiff.derivatives.broadcasting import (
    Vjp,
    along_axis,
    dtype_of,
    normalized_axes,
    of_dtype,
    shape_of,
)
from gpuopt.autodiff.derivatives.registry import derivative, refuse_argument


def _cumsum_vjp(ans: Any, a: Any, axis: int | None = None, dtype: Any = None) -> Vjp:
    if dtype is not None and np.dtype(dtype).kind in "biu":
        refuse_argument(anp.cumsum, "dtype")
    shape, own_dtype = shape_of(a), dtype_of(a)
    along = 0 if axis is None else axis
    backwards = along_axis(len(shape_of(ans)), along, slice(None, None, -1))

    def vjp(g: Any) -> Any:
        sums = np.cumsum(g[backwards], along)[backwards]
        return of_dtype(np.reshape(sums, shape), own_dtype)

    return vjp


def _diff_vjp(
    ans: Any, a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None
) -> Vjp:
    shape, own_dtype = shape_of(a), dtype_of(a)
    if shape_of(ans)[axis] == 0:
        zeros = np.zeros_like(a)
        return lambda g: zeros
    first, last = (along_axis(len(shape), axis, s) for s in (slice(1), slice(-1, None)))
    start = 0 if prepend is None else (np.shape(prepend) or {axis: 1})[axis]
    own = along_axis(len(shape), axis, slice(start, start + shape[axis]))

    def vjp(g: Any) -> Any:
        for _ in range(n):
            g = np.concatenate([-g[first], -np.diff(g, axis=axis), g[last]], axis)
        return of_dtype(g[own], own_dtype)

    return vjp


def _gradient_vjp(ans: Any, f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Vjp:
    ndim = len(shape_of(f))
    axes = normalized_axes(axis, ndim)
    if any(np.ndim(spacing) for spacing in varargs):
        refuse_argument(anp.gradient, "varargs")  # uneven spacing
    spacings = varargs * (len(axes) if len(varargs) == 1 else 1) or (1.0,) * len(axes)

    def vjp(g: Any) -> Any:
        parts = [g] if len(axes) == 1 else g
        by_axis = [
            np.moveaxis(_undone(np.moveaxis(part, along, 0), edge_order) / spacing, 0, along)
            for part, along, spacing in zip(parts, axes, spacings, strict=True)
        ]
        return sum(by_axis[1:], by_axis[0])

    return vjp


def _undone(g: Any, edge_order: int) -> Any:
    """Applies the transpose of numpy.gradient along the first axis, with a spacing of 1."""
    size = g.shape[0]

    def at(part: Any, start: int) -> Any:
        rest = size - start - part.shape[0]
        return np.pad(part, [(start, rest), *[(0, 0)] * (g.ndim - 1)])

    inside = g[1:-1] / 2
    slopes = at(inside, 2) - at(inside, 0)
    edge = (-1.0, 1.0) if edge_order == 1 else (-1.5, 2.0, -0.5)
    for distance, weight in enumerate(edge):
        slopes = slopes + at(g[:1] * weight, distance) - at(g[-1:] * weight, size - 1 - distance)
    return slopes


derivative(anp.cumsum, _cumsum_vjp)
derivative(anp.diff, _diff_vjp)
derivative(anp.gradient, _gradient_vjp)
