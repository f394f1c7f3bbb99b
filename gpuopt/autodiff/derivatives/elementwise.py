"""Derivatives of elementwise functions, in the type of their arguments."""

from __future__ import annotations

import math
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.numpy import numpy_wrapper
from autograd.tracer import trace_primitives_map

from gpuopt.autodiff.derivatives.broadcasting import Vjp, dtype_of, is_complex, of_dtype, summed_to
from gpuopt.autodiff.derivatives.registry import derivative

# Arithmetic

derivative(anp.add, lambda ans, x1, x2: summed_to(x1), lambda ans, x1, x2: summed_to(x2))
derivative(
    anp.subtract,
    lambda ans, x1, x2: summed_to(x1),
    lambda ans, x1, x2: summed_to(x2, lambda g: -g),
)
derivative(
    anp.multiply,
    lambda ans, x1, x2: summed_to(x1, lambda g: g * x2),
    lambda ans, x1, x2: summed_to(x2, lambda g: g * x1),
)
derivative(
    anp.divide,
    lambda ans, x1, x2: summed_to(x1, lambda g: g / x2),
    lambda ans, x1, x2: summed_to(x2, lambda g: -g * x1 / x2**2),
)


def _base_vjp(ans: Any, x1: Any, x2: Any) -> Vjp:
    if isinstance(x2, int | float):  # numpy.where would make an array of it, and of float64
        exponent: Any = x2 - 1 if x2 else 1.0
    else:
        exponent = np.where(x2 == 0, 1, x2 - 1)
    return summed_to(x1, lambda g: g * x2 * x1**exponent)


def _exponent_vjp(ans: Any, x1: Any, x2: Any) -> Vjp:
    if isinstance(x1, int | float):
        log: Any = math.log(x1) if x1 > 0 else 0.0 if x1 == 0 else math.nan
    else:
        log = np.log(np.where(x1 == 0, 1, x1))
    return summed_to(x2, lambda g: g * ans * log)


derivative(anp.power, _base_vjp, _exponent_vjp)
derivative(anp.exp2, lambda ans, x: lambda g: g * ans * math.log(2))
derivative(anp.log2, lambda ans, x: lambda g: g / x / math.log(2))
derivative(anp.log10, lambda ans, x: lambda g: g / x / math.log(10))


def _sinc_vjp(ans: Any, x: Any) -> Vjp:
    angle = np.where(x == 0, 1, math.pi * x)
    slope = np.where(x == 0, 0, (np.cos(angle) - np.sin(angle) / angle) / (angle / math.pi))
    return lambda g: g * slope


derivative(anp.sinc, _sinc_vjp)


# Choices: a tie is shared


def _chosen(mine: Any, other: Any, ans: Any) -> Vjp:
    def vjp(g: Any) -> Any:
        is_mine, is_tie = mine == ans, mine == other
        return g * of_dtype(is_mine, dtype_of(g)) / (1.0 + of_dtype(is_tie, dtype_of(g)))

    return summed_to(mine, vjp)


for _choice in (anp.maximum, anp.minimum, anp.fmax, anp.fmin):
    derivative(
        _choice,
        lambda ans, x1, x2: _chosen(x1, x2, ans),
        lambda ans, x1, x2: _chosen(x2, x1, ans),
    )

derivative(
    trace_primitives_map[np.where],
    None,
    lambda ans, condition, x, y: summed_to(x, lambda g: np.where(condition, g, 0)),
    lambda ans, condition, x, y: summed_to(y, lambda g: np.where(condition, 0, g)),
)


def _clip_vjp(
    ans: Any, a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Vjp:
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max
    inside = [ans != bound for bound in (low, high) if bound is not None]

    def vjp(g: Any) -> Any:
        for is_inside in inside:
            g = np.where(is_inside, g, 0)
        return g

    return summed_to(a, vjp)


derivative(anp.clip, _clip_vjp)


# What changes few elements, or only their type


def _nan_to_num_vjp(
    ans: Any, x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None
) -> Vjp:
    is_kept = np.isfinite(x)
    return lambda g: np.where(is_kept, g, 0)


def _astype_vjp(ans: Any, x: Any, dtype: Any, *, copy: bool = True, device: Any = None) -> Vjp:
    before = dtype_of(x)
    if np.dtype(dtype).kind in "biu":  # steps
        return lambda g: of_dtype(np.zeros_like(g), before)
    return lambda g: of_dtype(g, before)


derivative(anp.nan_to_num, _nan_to_num_vjp)
derivative(numpy_wrapper._astype, _astype_vjp)


# Parts of complex numbers


def _angle_vjp(ans: Any, z: Any, deg: bool = False) -> Vjp:
    factor = 180 / math.pi if deg else 1.0

    def vjp(g: Any) -> Any:
        by_z = g * np.conj(z * 1j) / np.abs(z) ** 2 * factor
        return by_z if is_complex(z) else np.real(by_z)

    return vjp


derivative(anp.angle, _angle_vjp)
derivative(anp.real_if_close, lambda ans, a, tol=100: summed_to(a))
