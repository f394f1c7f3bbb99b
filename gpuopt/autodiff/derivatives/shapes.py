"""Derivatives of functions that move elements, repeat them, or put constants beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import vspace
from autograd.tracer import getval

from gpuopt.autodiff.array_modules import array_module
from gpuopt.autodiff.derivatives.broadcasting import (
    Vjp,
    along_axis,
    dtype_of,
    inverse_order,
    of_dtype,
    shape_of,
    summed_to,
)
from gpuopt.autodiff.derivatives.indexing import put_back
from gpuopt.autodiff.derivatives.registry import (
    derivative,
    derivative_by_position,
    refuse_argument,
)

# The same elements in other shapes


def _reshaped_back(a: Any, order: Any = "C") -> Vjp:
    shape = shape_of(a)
    if order == "A":
        flags = getval(a).flags
        order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    return lambda g: np.reshape(g, shape, order=order)


def _ravel_vjp(ans: Any, a: Any, order: str = "C") -> Vjp:
    if order != "K":
        return _reshaped_back(a, order)
    shape, strides = shape_of(a), getval(a).strides
    axes = tuple(sorted(range(len(shape)), key=lambda axis: -abs(strides[axis])))
    sizes = tuple(shape[axis] for axis in axes)
    return lambda g: np.transpose(np.reshape(g, sizes), inverse_order(axes))


def _atleast_vjp(position: int, ans: Any, arrays: Any, options: Any) -> Vjp:
    shape = shape_of(arrays[position])
    if len(arrays) == 1:
        return lambda g: np.reshape(g, shape)
    return lambda g: np.reshape(g[position], shape)


derivative(
    anp.reshape, lambda ans, a, shape, order="C", *, copy=None: _reshaped_back(a, order or "C")
)
derivative(anp.ravel, _ravel_vjp)
derivative(anp.expand_dims, lambda ans, a, axis: _reshaped_back(a))
derivative(anp.squeeze, lambda ans, a, axis=None: _reshaped_back(a))
for _atleast in (anp.atleast_1d, anp.atleast_2d, anp.atleast_3d):
    derivative_by_position(_atleast, _atleast_vjp)
derivative(anp.copy, lambda ans, a, order="K", subok=False: lambda g: g)


# Other orders of the axes, and along them


def _transpose_vjp(ans: Any, a: Any, axes: Any = None) -> Vjp:
    if axes is None:
        return lambda g: np.transpose(g)
    back = inverse_order([axis % len(axes) for axis in axes])
    return lambda g: np.transpose(g, back)


def _rollaxis_vjp(ans: Any, a: Any, axis: int, start: int = 0) -> Vjp:
    ndim = len(shape_of(a))
    axis, start = axis % ndim, start + ndim if start < 0 else start
    return lambda g: np.moveaxis(g, start - 1 if axis < start else start, axis)


def _roll_vjp(ans: Any, a: Any, shift: Any, axis: Any = None) -> Vjp:
    back = tuple(-s for s in shift) if isinstance(shift, tuple | list) else -shift
    return lambda g: np.roll(g, back, axis)


derivative(anp.transpose, _transpose_vjp)
derivative(anp.swapaxes, lambda ans, a, axis1, axis2: lambda g: np.swapaxes(g, axis1, axis2))
derivative(
    anp.moveaxis, lambda ans, a, source, destination: lambda g: np.moveaxis(g, destination, source)
)
derivative(anp.rollaxis, _rollaxis_vjp)
derivative(anp.roll, _roll_vjp)
derivative(anp.flipud, lambda ans, m: lambda g: np.flipud(g))
derivative(anp.fliplr, lambda ans, m: lambda g: np.fliplr(g))
derivative(anp.rot90, lambda ans, m, k=1, axes=(0, 1): lambda g: np.rot90(g, -k, axes))


# Parts


def _split_vjp(function: Any, axis_of: Callable[[int], int]) -> Callable[..., Vjp]:
    def make(ans: Any, ary: Any, indices_or_sections: Any) -> Vjp:
        return _joined_again(function, ans, ary, axis_of(len(shape_of(ary))))

    return make


def _split_along_axis_vjp(function: Any) -> Callable[..., Vjp]:
    def make(ans: Any, ary: Any, indices_or_sections: Any, axis: int = 0) -> Vjp:
        return _joined_again(function, ans, ary, axis)

    return make


def _joined_again(function: Any, parts: Any, whole: Any, axis: int) -> Vjp:
    if sum(shape_of(part)[axis] for part in parts) != shape_of(whole)[axis]:
        refuse_argument(function, "indices_or_sections")  # parts that overlap
    return lambda g: np.concatenate(list(g), axis)


derivative(anp.split, _split_along_axis_vjp(anp.split))
derivative(anp.array_split, _split_along_axis_vjp(anp.array_split))
derivative(anp.vsplit, _split_vjp(anp.vsplit, lambda ndim: 0))
derivative(anp.hsplit, _split_vjp(anp.hsplit, lambda ndim: min(1, ndim - 1)))
derivative(anp.dsplit, _split_vjp(anp.dsplit, lambda ndim: 2))
derivative(anp.triu, lambda ans, m, k=0: lambda g: np.triu(g, k))
derivative(anp.tril, lambda ans, m, k=0: lambda g: np.tril(g, k))


# Repeated elements


def _repeat_vjp(ans: Any, a: Any, repeats: Any, axis: int | None = None) -> Vjp:
    space, shape = vspace(a), shape_of(a)
    flat = (math.prod(shape),) if axis is None else shape
    along = 0 if axis is None else axis % len(shape)
    if np.size(repeats) == 1:
        sizes = (*flat[: along + 1], int(np.reshape(repeats, ())), *flat[along + 1 :])
        return lambda g: np.reshape(np.sum(np.reshape(g, sizes), axis=along + 1), shape)
    positions = np.repeat(np.arange(flat[along]), repeats)
    if axis is None:
        index: Any = np.unravel_index(positions, shape)
    else:
        index = along_axis(len(shape), along, positions)
    return lambda g: put_back(g, index, space)


def _tile_vjp(ans: Any, A: Any, reps: Any) -> Vjp:
    shape = shape_of(A)
    reps = tuple(reps) if np.ndim(reps) else (reps,)
    ndim = max(len(reps), len(shape))
    reps = (1,) * (ndim - len(reps)) + reps
    sizes = (1,) * (ndim - len(shape)) + shape
    pairs = [n for pair in zip(reps, sizes, strict=True) for n in pair]

    def vjp(g: Any) -> Any:
        return np.reshape(np.sum(np.reshape(g, pairs), axis=tuple(range(0, 2 * ndim, 2))), shape)

    return vjp


derivative(anp.repeat, _repeat_vjp)
derivative(anp.tile, _tile_vjp)
derivative(anp.broadcast_to, lambda ans, array, shape, subok=False: summed_to(array))


# Constants beside the elements, and elements among constants


def _pad_vjp(
    ans: Any, array: Any, pad_width: Any, mode: Any = "constant", *, constant_values: Any = 0
) -> Vjp:
    if mode != "constant":
        refuse_argument(anp.pad, "mode", mode)
    shape = shape_of(array)
    if isinstance(pad_width, dict):
        pad_width = [pad_width.get(i, pad_width.get(i - len(shape), 0)) for i in range(len(shape))]
        pad_width = [np.broadcast_to(width, 2) for width in pad_width]
    widths = np.broadcast_to(pad_width, (len(shape), 2)).tolist()
    inside = tuple(slice(left, left + n) for (left, _), n in zip(widths, shape, strict=True))
    return lambda g: g[inside]


def _full_vjp(
    ans: Any,
    shape: Any,
    fill_value: Any,
    dtype: Any = None,
    order: str = "C",
    *,
    device: Any = None,
) -> Vjp:
    return _filled(anp.full, ans, fill_value)


def _full_like_vjp(
    ans: Any,
    a: Any,
    fill_value: Any,
    dtype: Any = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
    *,
    device: Any = None,
) -> Vjp:
    return _filled(anp.full_like, ans, fill_value)


def _filled(function: Any, ans: Any, fill_value: Any) -> Vjp:
    if dtype_of(ans).kind in "biu":
        refuse_argument(function, "dtype")
    dtype = dtype_of(fill_value)
    return summed_to(fill_value, lambda g: of_dtype(g, dtype))


def _linspace_vjp(function: Callable[[Any], Any], argnum: int) -> Callable[..., Vjp]:
    def make(
        ans: Any,
        start: Any,
        stop: Any,
        num: int = 50,
        endpoint: bool = True,
        *,
        axis: int = 0,
        device: Any = None,
    ) -> Vjp:
        fractions = array_module(getval(ans)).linspace(0, 1, num, endpoint=endpoint)
        weights = of_dtype(function(fractions), dtype_of(ans))
        bound = start if argnum == 0 else stop
        return summed_to(bound, lambda g: np.tensordot(weights, np.moveaxis(g, axis, 0), 1))

    return make


derivative(anp.pad, _pad_vjp)
derivative(anp.full, None, _full_vjp)
derivative(anp.full_like, None, _full_like_vjp)
derivative(anp.linspace, _linspace_vjp(lambda t: 1 - t, 0), _linspace_vjp(lambda t: t, 1))
