"""Derivatives of sums, products, statistics and extremes along axes."""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy import numpy_wrapper

from gpuopt.autodiff.derivatives.broadcasting import (
    Vjp,
    dtype_of,
    inverse_order,
    is_complex,
    kept_shape,
    normalized_axes,
    of_dtype,
    shape_of,
    spread,
)
from gpuopt.autodiff.derivatives.registry import composition, derivative, refuse_argument

_mean, _var, _std = (
    numpy_wrapper._primitive_mean,
    numpy_wrapper._primitive_var,
    numpy_wrapper._primitive_std,
)


def _by_element(function: Any, a: Any, axis: Any, dtype: Any, where: Any, vjp: Vjp) -> Vjp:
    """Spreads the gradient by a reduction over the elements before `vjp` is applied to it.

    It does not keep the array alive. An integer dtype is refused: sums would be rounded.
    """
    shape, own_dtype = shape_of(a), dtype_of(a)
    if dtype is not None and np.dtype(dtype).kind in "biu":
        refuse_argument(function, "dtype")

    def by_element(g: Any) -> Any:
        g = vjp(spread(g, shape, axis))
        return of_dtype(g if where is True else np.where(where, g, 0), own_dtype)

    return by_element


def _share(a: Any, axis: Any, where: Any, ddof: float = 0) -> Any:
    """Returns 1 / (number of elements - ddof): a number, or an array that keeps the axes."""
    shape = shape_of(a)
    if where is True:
        count = math.prod(shape[i] for i in normalized_axes(axis, len(shape)))
        return 1 / (count - ddof) if count > ddof else math.nan
    count = np.sum(np.broadcast_to(where, shape), axis=axis, keepdims=True)
    return of_dtype(1 / np.where(count > ddof, count - ddof, math.nan), dtype_of(a))


def _sum_vjp(
    ans: Any,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    *,
    keepdims: bool = False,
    initial: Any = 0,
    where: Any = True,
) -> Vjp:
    return _by_element(anp.sum, a, axis, dtype, where, lambda g: g)


def _mean_vjp(
    ans: Any,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    *,
    keepdims: bool = False,
    where: Any = True,
) -> Vjp:
    share = _share(a, axis, where)
    return _by_element(_mean, a, axis, dtype, where, lambda g: g * share)


def _prod_vjp(
    ans: Any,
    a: Any,
    axis: Any = None,
    dtype: Any = None,
    *,
    keepdims: bool = False,
    initial: Any = 1,
    where: Any = True,
) -> Vjp:
    def vjp(g: Any) -> Any:
        factors = a if where is True else np.where(where, a, 1)
        return g * _product_of_others(factors, normalized_axes(axis, len(shape_of(a)))) * initial

    return _by_element(anp.prod, a, axis, dtype, where, vjp)


def _product_of_others(a: Any, axes: tuple[int, ...]) -> Any:
    """For each element, multiplies all others along `axes`. Zeros do no harm, as in a quotient."""
    shape = shape_of(a)
    order = (*(i for i in range(len(shape)) if i not in axes), *axes)
    sizes = tuple(shape[i] for i in order)
    num_kept = len(order) - len(axes)
    flat = np.reshape(np.transpose(a, order), (*sizes[:num_kept], math.prod(sizes[num_kept:])))
    others = _product_before(flat) * _product_before(flat[..., ::-1])[..., ::-1]
    return np.transpose(np.reshape(others, sizes), inverse_order(order))


def _product_before(a: Any) -> Any:
    """For each element, multiplies all elements before it in the last dimension."""
    product = np.concatenate([np.ones_like(a[..., :1]), a[..., :-1]], -1)
    reach = 1
    while reach < shape_of(a)[-1]:
        ones = np.ones_like(product[..., :reach])
        product = product * np.concatenate([ones, product[..., :-reach]], -1)
        reach *= 2
    return product


def _spread_vjp(function: Any, *, is_root: bool) -> Any:
    """Makes the derivative of the variance, or of its root."""

    def make(
        ans: Any,
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        *,
        ddof: float = 0,
        keepdims: bool = False,
        where: Any = True,
        mean: Any = None,
        correction: float | None = None,
    ) -> Vjp:
        share = _share(a, axis, where, ddof if correction is None else correction)
        factor = share if is_root else 2 * share
        by_variance = _by_element(
            function, a, axis, dtype, where, lambda g: g * _deviation(a, axis, where, mean) * factor
        )
        if not is_root:
            return by_variance
        # Where all elements are equal, numpy's standard deviation has no slope; 0 does no harm.
        return lambda g: by_variance(g / np.where(ans == 0, 1, ans))

    return make


def _deviation(a: Any, axis: Any, where: Any, mean: Any) -> Any:
    if mean is None:
        options = {} if where is True else {"where": where}
        mean = np.mean(a, axis=axis, keepdims=True, **options)
    return np.conj(a - mean) if is_complex(a) else a - mean


def _extremum_vjp(
    ans: Any,
    a: Any,
    axis: Any = None,
    *,
    keepdims: bool = False,
    initial: Any = None,
    where: Any = True,
) -> Vjp:
    def vjp(g: Any) -> Any:
        extremum = np.reshape(ans, kept_shape(shape_of(a), axis))
        is_attained = a == extremum
        if where is not True:
            is_attained = is_attained & where
        ties = np.sum(is_attained, axis=axis, keepdims=True)
        if initial is not None:  # it counts as one more element
            ties = np.where(extremum == initial, ties + 1, ties)
        return g * of_dtype(is_attained / ties, dtype_of(g))

    return _by_element(anp.max, a, axis, None, True, vjp)


derivative(anp.sum, _sum_vjp)
derivative(_mean, _mean_vjp)
derivative(anp.prod, _prod_vjp)
derivative(_var, _spread_vjp(_var, is_root=False))
derivative(_std, _spread_vjp(_std, is_root=True))
for _extremum in (anp.max, anp.min, anp.amax, anp.amin):
    derivative(_extremum, _extremum_vjp)


# Made of other functions


@composition(np.average)
def _average(
    a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: bool = False
) -> Any:
    if weights is None:
        average = np.mean(a, axis=axis, keepdims=keepdims)
        if not returned:
            return average
        weights = np.ones_like(a)
    elif shape_of(weights) != shape_of(a):
        axes = normalized_axes(axis, len(shape_of(a)))
        order = sorted(range(len(axes)), key=axes.__getitem__)
        sizes = iter(np.transpose(weights, order).shape)
        along = [next(sizes, 1) if i in axes else 1 for i in range(len(shape_of(a)))]
        weights = np.reshape(np.transpose(weights, order), along)
        weights = np.broadcast_to(weights, shape_of(a))
    total = np.sum(weights, axis=axis, keepdims=keepdims)
    average = np.sum(a * weights, axis=axis, keepdims=keepdims) / total
    return (average, total) if returned else average
