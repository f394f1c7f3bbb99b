"""Undoes numpy's broadcasting and reductions: brings a gradient to the shape of an argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Vjp = Callable[[Any], Any]


def shape_of(x: Any) -> tuple[int, ...]:
    """Returns an array's shape; () for a number."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return shape


def is_complex(x: Any) -> bool:
    """Says whether an array or a number is complex."""
    dtype = getattr(x, "dtype", None)
    return isinstance(x, complex) if dtype is None else dtype.kind == "c"


def summed_to(x: Any, vjp: Vjp | None = None) -> Vjp:
    """Returns a function that brings gradients to the shape and dtype of `x`, which was broadcast.

    It applies `vjp` first, and does not keep `x` alive.
    """
    shape, dtype = shape_of(x), getattr(x, "dtype", None)

    def to_argument(g: Any) -> Any:
        if vjp is not None:
            g = vjp(g)
        if g.shape != shape:
            g = _summed(g, shape)
        return g if g.dtype == dtype or dtype is None else of_dtype(g, dtype)

    return to_argument


def _summed(g: Any, shape: tuple[int, ...]) -> Any:
    extra = g.ndim - len(shape)
    stretched = [extra + i for i, n in enumerate(shape) if n == 1 != g.shape[extra + i]]
    return np.reshape(np.sum(g, axis=(*range(extra), *stretched)), shape)


def normalized_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes that numpy means by `axis`, counted from the front."""
    if axis is None:
        return tuple(range(ndim))
    return tuple(a % ndim for a in (axis if isinstance(axis, tuple | list) else (axis,)))


def kept_shape(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    """Returns the shape that a reduction over `axis` gives with keepdims=True."""
    reduced = normalized_axes(axis, len(shape))
    return tuple(1 if i in reduced else n for i, n in enumerate(shape))


def spread(g: Any, shape: tuple[int, ...], axis: Any) -> Any:
    """Undoes a reduction over `axis` of an array of `shape`: each element gets its sum's value."""
    return np.broadcast_to(np.reshape(g, kept_shape(shape, axis)), shape)


def of_dtype(x: Any, dtype: Any) -> Any:
    """Converts an array; the real part, where a complex one becomes real."""
    if x.dtype == dtype:
        return x
    return (np.real(x) if x.dtype.kind == "c" != dtype.kind else x).astype(dtype)


def dtype_of(x: Any) -> Any:
    """Returns an array's dtype, or the one that numpy gives a number."""
    return np.result_type(x) if isinstance(x, float | int | complex) else x.dtype


def along_axis(ndim: int, axis: int, index: Any) -> tuple[Any, ...]:
    """Returns an index that is `index` along `axis`, and everything along the others."""
    full = [slice(None)] * ndim
    full[axis] = index
    return tuple(full)


def inverse_order(axes: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of axes that undoes a transposition by `axes`."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))
