"""Derivatives of functions that pick elements, or sort them."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import SparseObject, primitive, vspace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval
from autograd.util import func

from gpuopt.autodiff.array_modules import array_module
from gpuopt.autodiff.derivatives.broadcasting import Vjp, dtype_of, of_dtype, shape_of
from gpuopt.autodiff.derivatives.registry import derivative, refuse_argument


@primitive
def put_back(x: Any, index: Any, space: Any) -> Any:
    """Returns zeros with `x` added at `index`, as an array that is made when it is needed."""

    def add_to(array: Any) -> Any:
        if _is_basic(index):
            array[index] += x
        else:
            array_module(array).add.at(array, index, x)
        return array

    return SparseObject(space, add_to)


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(i, int | np.integer | slice | type(None) | type(...)) for i in parts)


def _item_vjp(ans: Any, A: Any, idx: Any) -> Vjp:
    space = vspace(A)
    return lambda g: put_back(g, idx, space)


def _take_vjp(
    ans: Any, a: Any, indices: Any, axis: int | None = None, *, mode: str = "raise"
) -> Vjp:
    space, shape = vspace(a), shape_of(a)
    xp = array_module(indices)
    size = np.size(a) if axis is None else shape[axis]
    positions = xp.asarray(indices)
    positions = xp.clip(positions, 0, size - 1) if mode == "clip" else positions % size
    if axis is None:
        index: Any = xp.unravel_index(positions, shape)
    else:
        index = (*(slice(None),) * (axis % len(shape)), positions)
    return lambda g: put_back(g, index, space)


derivative(func(ArrayBox.__getitem__), _item_vjp)
derivative(put_back, lambda ans, x, index, space: lambda g: g[index])
derivative(anp.take, _take_vjp)


# Sorted elements


def _sort_vjp(
    ans: Any,
    a: Any,
    axis: int | None = -1,
    kind: Any = None,
    *,
    stable: Any = None,
) -> Vjp:
    return _permuted_back(a, axis, lambda flat, along: np.argsort(flat, along))


def _partition_vjp(ans: Any, a: Any, kth: Any, axis: int | None = -1, kind: Any = None) -> Vjp:
    def order(flat: Any, along: int) -> Any:
        # numpy.argpartition may order elements otherwise than numpy.partition does.
        rank = np.argsort(np.argsort(getval(ans), along), along)
        return np.take_along_axis(np.argsort(flat, along), rank, along)

    return _permuted_back(a, axis, order)


def _permuted_back(a: Any, axis: int | None, order_of: Any) -> Vjp:
    space, shape, value = vspace(a), shape_of(a), getval(a)
    if axis is None:
        index = array_module(value).unravel_index(order_of(np.ravel(value), 0), shape)
    else:
        parts: list[Any] = list(np.ix_(*map(np.arange, shape)))
        parts[axis] = order_of(value, axis)
        index = tuple(parts)
    return lambda g: put_back(g, index, space)


derivative(anp.sort, _sort_vjp)
derivative(anp.partition, _partition_vjp)


# Diagonals


def _diagonal_vjp(ans: Any, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Vjp:
    space, ndim = vspace(a), len(shape_of(a))
    first, second = sorted((axis1 % ndim, axis2 % ndim))
    # The position at which numpy puts the dimension of two index arrays.
    position = first if second == first + 1 else 0
    index: list[Any] = [slice(None)] * ndim
    index[axis1], index[axis2] = _on_diagonal(shape_of(a)[axis1], shape_of(a)[axis2], offset)
    return lambda g: put_back(np.moveaxis(g, -1, position), tuple(index), space)


def _on_diagonal(height: int, width: int, offset: int) -> tuple[Any, Any]:
    """Returns the row and the column of each element on a matrix's diagonal."""
    down, right = max(-offset, 0), max(offset, 0)
    steps = np.arange(max(0, min(height - down, width - right)))
    return steps + down, steps + right


def _diag_vjp(ans: Any, v: Any, k: int = 0) -> Vjp:
    if len(shape_of(v)) == 1:
        return lambda g: np.diagonal(g, k)
    height, width = shape_of(v)
    space, index = vspace(v), _on_diagonal(height, width, k)
    return lambda g: put_back(g, index, space)


def _trace_vjp(
    ans: Any, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None
) -> Vjp:
    if dtype is not None and np.dtype(dtype).kind in "biu":
        refuse_argument(anp.trace, "dtype")
    rows, _ = _on_diagonal(shape_of(a)[axis1], shape_of(a)[axis2], offset)
    by_diagonal = _diagonal_vjp(ans, a, offset, axis1, axis2)
    own_dtype = dtype_of(a)

    def vjp(g: Any) -> Any:
        each = np.broadcast_to(np.reshape(g, (*g.shape, 1)), (*g.shape, len(rows)))
        return by_diagonal(of_dtype(each, own_dtype))

    return vjp


derivative(anp.diagonal, _diagonal_vjp)
derivative(anp.diag, _diag_vjp)
derivative(anp.trace, _trace_vjp)
