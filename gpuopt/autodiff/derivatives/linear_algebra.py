"""Derivatives of numpy.linalg's functions, of one matrix or of many."""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy.linalg import _primitive_norm
from autograd.tracer import getval

from gpuopt.autodiff.array_modules import array_module
from gpuopt.autodiff.derivatives.broadcasting import (
    Vjp,
    dtype_of,
    is_complex,
    kept_shape,
    of_dtype,
    shape_of,
    summed_to,
)
from gpuopt.autodiff.derivatives.registry import derivative, refuse_argument


def _t(a: Any) -> Any:
    return np.swapaxes(a, -1, -2)


def _eye(n: int, like: Any) -> Any:
    value = getval(like)
    return array_module(value).eye(n, dtype=value.dtype)


def _each(numbers: Any) -> Any:
    """Gives an array of one number for each matrix two more axes, to multiply the matrices."""
    return np.reshape(numbers, (*shape_of(numbers), 1, 1))


# Inverses and determinants


def _pinv_vjp(ans: Any, a: Any, rcond: Any = None, *, rtol: Any = None) -> Vjp:
    def vjp(g: Any) -> Any:
        gt, inverse_t = _t(g), _t(ans)
        of_rows = _eye(shape_of(a)[-2], a) - a @ ans
        of_columns = _eye(shape_of(a)[-1], a) - ans @ a
        return _t(ans @ inverse_t @ g @ of_rows + of_columns @ g @ inverse_t @ ans - ans @ gt @ ans)

    return vjp


def _solve_a_vjp(ans: Any, a: Any, b: Any) -> Vjp:
    is_vector = np.ndim(b) == 1

    def vjp(g: Any) -> Any:
        by_b = np.linalg.solve(_t(a), _column(g, is_vector))
        return -(by_b @ _t(_column(ans, is_vector)))

    return summed_to(a, vjp)


def _solve_b_vjp(ans: Any, a: Any, b: Any) -> Vjp:
    is_vector = np.ndim(b) == 1

    def vjp(g: Any) -> Any:
        by_b = np.linalg.solve(_t(a), _column(g, is_vector))
        return by_b[..., 0] if is_vector else by_b

    return summed_to(b, vjp)


def _column(b: Any, is_vector: bool) -> Any:
    return b[..., None] if is_vector else b


def _cholesky_vjp(ans: Any, a: Any, *, upper: bool = False) -> Vjp:
    """Murray 2016, "Differentiation of the Cholesky decomposition", section 4."""
    lower = _t(ans) if upper else ans

    def vjp(g: Any) -> Any:
        product = np.tril(_t(lower) @ (_t(g) if upper else g))
        half = product / (1.0 + _eye(shape_of(lower)[-1], lower))
        inverse_t = np.linalg.inv(_t(lower))
        by_a = inverse_t @ half @ _t(inverse_t)
        return (by_a + _t(by_a)) / 2.0

    return vjp


derivative(anp.linalg.inv, lambda ans, a: lambda g: -(_t(ans) @ g @ _t(ans)))
derivative(anp.linalg.pinv, _pinv_vjp)
derivative(anp.linalg.solve, _solve_a_vjp, _solve_b_vjp)
derivative(anp.linalg.det, lambda ans, a: lambda g: _each(g * ans) * _t(np.linalg.inv(a)))
derivative(anp.linalg.slogdet, lambda ans, a: lambda g: _each(g[1]) * _t(np.linalg.inv(a)))
derivative(anp.linalg.cholesky, _cholesky_vjp)


# Eigenvalues and singular values


def _eigh_vjp(ans: Any, a: Any, UPLO: str = "L") -> Vjp:
    values, vectors = ans
    size = shape_of(a)[-1]

    def vjp(g: Any) -> Any:
        by_values, by_vectors = g
        conjugates = np.conj(vectors)
        slope = (conjugates * by_values[..., None, :]) @ _t(vectors)
        if np.any(by_vectors):  # else equal eigenvalues do no harm
            gaps = values[..., None, :] - values[..., :, None] + _eye(size, values)
            turned = (_t(vectors) @ by_vectors) * ((1 - _eye(size, values)) / gaps)
            slope = slope + conjugates @ turned @ _t(vectors)
        # Only this triangle of the matrix was read.
        ones = np.ones_like(a)
        triangle = np.tril(ones, -1) if UPLO.upper() == "L" else np.triu(ones, 1)
        return np.real(slope) * _eye(size, a) + (slope + np.conj(_t(slope))) * triangle

    return vjp


def _eig_vjp(ans: Any, a: Any) -> Vjp:
    """Boeddeker et al. 2017, "On the computation of complex-valued gradients", equation 4.77."""
    values, vectors = ans
    size = shape_of(a)[-1]

    def vjp(g: Any) -> Any:
        by_values, by_vectors = g
        eye = _eye(size, vectors)
        inverse_gaps = (1 - eye) / (values[..., None, :] - values[..., :, None] + eye)
        turned = _t(vectors) @ by_vectors
        lengths = (_t(vectors) @ np.conj(vectors)) @ (np.real(turned) * eye)
        middle = eye * by_values[..., None, :] + inverse_gaps * (turned - lengths)
        by_a = np.linalg.inv(_t(vectors)) @ middle @ _t(vectors)
        return by_a if is_complex(a) else np.real(by_a)

    return vjp


def _svd_vjp(ans: Any, a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Vjp:
    """Wan and Zhang 2019, "Automatic differentiation for complex valued SVD"."""
    rows, columns = shape_of(a)[-2:]
    if not compute_uv:
        return lambda g: _by_singular_values(g, *np.linalg.svd(a, full_matrices=False))
    if full_matrices and rows != columns:
        refuse_argument(anp.linalg.svd, "full_matrices", full_matrices)
    u, values, vh = ans

    def vjp(g: Any) -> Any:
        by_u, by_values, by_vh = g
        slope = _by_singular_values(by_values, u, values, vh)
        if np.any(by_u) or np.any(by_vh):  # else equal singular values do no harm
            slope = slope + _by_singular_vectors(by_u, by_vh, u, values, vh)
        return slope

    return vjp


def _by_singular_values(g: Any, u: Any, values: Any, vh: Any) -> Any:
    return (np.conj(u) * g[..., None, :]) @ np.conj(vh)


def _by_singular_vectors(by_u: Any, by_vh: Any, u: Any, values: Any, vh: Any) -> Any:
    v, by_v = np.conj(_t(vh)), np.conj(_t(by_vh))
    eye = _eye(shape_of(values)[-1], values)
    of_column, of_row = values[..., None, :], values[..., :, None]
    inverse_gaps = (1 - eye) / (of_column**2 - of_row**2 + eye)
    turned_u, turned_v = _t(u) @ by_u, _t(v) @ by_v
    middle = inverse_gaps * (turned_u - np.conj(_t(turned_u))) * of_column
    middle = middle + inverse_gaps * (turned_v - np.conj(_t(turned_v))) * of_row
    if is_complex(u):
        middle = middle + 1j * np.imag(turned_u * eye) / of_column
    slope = np.conj(u) @ middle @ _t(v)
    rows, columns = shape_of(u)[-2], shape_of(v)[-2]
    if rows < columns:
        rest = _eye(columns, v) - v @ np.conj(_t(v))
        slope = slope + np.conj((u / of_column) @ _t(by_v) @ rest)
    elif rows > columns:
        rest = _eye(rows, u) - u @ np.conj(_t(u))
        slope = slope + _t((v / of_column) @ _t(by_u) @ rest)
    return slope


derivative(anp.linalg.eigh, _eigh_vjp)
derivative(anp.linalg.eig, _eig_vjp)
derivative(anp.linalg.svd, _svd_vjp)


# Norms


def _norm_vjp(ans: Any, x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Vjp:
    shape, dtype = shape_of(x), dtype_of(x)
    num_axes = len(shape) if axis is None else np.size(axis)
    is_of_matrix = ord is not None and num_axes == 2
    if ord == "nuc":
        slope = _nuclear_slope(x, axis)
    elif ord in (None, "fro") or (ord == 2 and not is_of_matrix):
        slope = np.conj(x) / _not_zero(np.reshape(ans, kept_shape(shape, axis)))
    elif is_of_matrix or ord == 0:
        refuse_argument(_primitive_norm, "ord", ord)
    else:
        slope = _vector_slope(np.reshape(ans, kept_shape(shape, axis)), x, ord, axis)
    return lambda g: of_dtype(np.reshape(g, kept_shape(shape, axis)) * slope, dtype)


def _vector_slope(norm: Any, x: Any, ord: float, axis: Any) -> Any:
    size = np.abs(x)
    direction = np.conj(x) / _not_zero(size)
    if math.isinf(ord):
        is_attained = size == norm  # a tie is shared
        ties = np.sum(is_attained, axis=axis, keepdims=True)
        return direction * of_dtype(is_attained / ties, norm.dtype)
    return direction * (size / _not_zero(norm)) ** (ord - 1)


def _nuclear_slope(x: Any, axis: Any) -> Any:
    axes = (0, 1) if axis is None else axis
    u, _, vh = np.linalg.svd(np.moveaxis(x, axes, (-2, -1)), full_matrices=False)
    return np.moveaxis(np.conj(u @ vh), (-2, -1), axes)


def _not_zero(x: Any) -> Any:
    """Replaces zeros by ones: a norm of zero has no slope, and 0 / 1 gives the gradient 0."""
    return np.where(x == 0, 1, x)


derivative(_primitive_norm, _norm_vjp)
