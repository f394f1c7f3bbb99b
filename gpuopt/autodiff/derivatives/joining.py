"""Arrays made of several arrays."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.extend import primitive
from autograd.tracer import getval, isbox

from gpuopt.autodiff.array_modules import array_module, is_array
from gpuopt.autodiff.derivatives.broadcasting import Vjp, along_axis, shape_of
from gpuopt.autodiff.derivatives.registry import composition, derivative_by_position


@primitive
def _concatenate(axis: int, *arrays: Any) -> Any:
    return np.concatenate(arrays, axis)


def _concatenate_vjp(position: int, ans: Any, args: Any, options: Any) -> Vjp:
    axis, arrays = args[0], args[1:]
    if axis is None:  # as autograd.numpy.concatenate passes it on
        sizes = [np.size(array) for array in arrays]
    else:
        sizes = [shape_of(array)[axis] for array in arrays]
    start = sum(sizes[: position - 1])
    part = along_axis(len(shape_of(ans)), axis or 0, slice(start, start + sizes[position - 1]))
    shape = shape_of(arrays[position - 1])
    return lambda g: np.reshape(g[part], shape)


for _function in (_concatenate, anp.concatenate_args):
    derivative_by_position(_function, _concatenate_vjp)


@composition(np.concatenate)
def _concatenated(arrays: Any, axis: int | None = 0) -> Any:
    if axis is None:
        arrays, axis = map(np.ravel, arrays), 0
    return _concatenate(axis, *arrays)


@composition(np.stack)
def _stacked(arrays: Any, axis: int = 0) -> Any:
    arrays = _as_arrays(arrays)
    position = axis % (len(shape_of(arrays[0])) + 1)
    return _concatenate(position, *(array[(slice(None),) * position + (None,)] for array in arrays))


@composition(np.vstack)
def _vstacked(tup: Any) -> Any:
    return _concatenate(0, *map(np.atleast_2d, _as_arrays(tup)))


@composition(np.hstack)
def _hstacked(tup: Any) -> Any:
    arrays = [np.atleast_1d(array) for array in _as_arrays(tup)]
    return _concatenate(0 if len(shape_of(arrays[0])) == 1 else 1, *arrays)


@composition(np.dstack)
def _dstacked(tup: Any) -> Any:
    return _concatenate(2, *map(np.atleast_3d, _as_arrays(tup)))


@composition(np.column_stack)
def _columns_stacked(tup: Any) -> Any:
    arrays = _as_arrays(tup)
    return _concatenate(1, *(a if len(shape_of(a)) > 1 else np.reshape(a, (-1, 1)) for a in arrays))


@composition(np.append)
def _appended(arr: Any, values: Any, axis: int | None = None) -> Any:
    arrays = _as_arrays([arr, values])
    return _concatenated(arrays, axis)


@composition(np.select)
def _selected(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    if len(condlist) != len(choicelist):
        raise ValueError("list of cases must be same length as list of conditions")
    result = default
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        result = np.where(condition, choice, result)
    return result


def _as_arrays(elements: Any) -> list[Any]:
    """Makes arrays of numbers and lists, on the device where the others are."""
    elements = list(elements)
    arrays = [element for element in map(getval, elements) if is_array(element)]
    xp = array_module(arrays[0]) if arrays else np
    return [e if isbox(e) or is_array(e) else xp.asarray(e) for e in elements]
