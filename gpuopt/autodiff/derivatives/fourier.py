"""Derivatives of numpy.fft's functions.

As in autograd, the gradient by a complex number is the derivative by its real part, minus i times
the one by its imaginary part. So the derivative of a linear map is its transpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval

from gpuopt.autodiff.array_modules import array_module
from gpuopt.autodiff.derivatives.broadcasting import Vjp, dtype_of, of_dtype, shape_of
from gpuopt.autodiff.derivatives.registry import derivative

# For each norm, the norm with which the inverse transform has the same scale.
_OF_INVERSE: dict[Any, Any] = {
    None: "forward",
    "backward": "forward",
    "forward": "backward",
    "ortho": "ortho",
}


def _fft_vjp(ans: Any, a: Any, s: Any, axes: Sequence[int], norm: Any) -> Vjp:
    to_input = _resized_to(a)
    return lambda g: to_input(np.fft.fftn(g, axes=axes, norm=norm))


def _ifft_vjp(ans: Any, a: Any, s: Any, axes: Sequence[int], norm: Any) -> Vjp:
    to_input = _resized_to(a)
    return lambda g: to_input(np.fft.ifftn(g, axes=axes, norm=norm))


def _rfft_vjp(ans: Any, a: Any, s: Any, axes: Sequence[int], norm: Any) -> Vjp:
    to_input = _resized_to(a)
    shape = list(shape_of(ans))
    length = shape_of(a)[axes[-1]] if s is None or s[-1] in (None, -1) else s[-1]
    shape[axes[-1]] = length
    return lambda g: to_input(np.fft.fftn(_resized(g, shape), axes=axes, norm=norm))


def _irfft_vjp(ans: Any, a: Any, s: Any, axes: Sequence[int], norm: Any) -> Vjp:
    to_input = _resized_to(a)
    *others, last = axes
    length = shape_of(ans)[last]
    # Each element but the first, and the last of an even length, stands for two of the spectrum.
    weights = np.full(length // 2 + 1, 2, dtype_of(ans))
    weights[0] = 1
    if length % 2 == 0:
        weights[-1] = 1
    along = [-1 if axis == last else 1 for axis in range(len(shape_of(ans)))]
    weights = array_module(getval(ans)).asarray(weights.reshape(along))

    def vjp(g: Any) -> Any:
        g = weights * np.conj(np.fft.rfft(g, axis=last, norm=_OF_INVERSE[norm]))
        return to_input(np.fft.ifftn(g, axes=others, norm=norm) if others else g)

    return vjp


def _resized_to(a: Any) -> Vjp:
    """Returns a function that crops gradients to the shape of `a`, or fills them with zeros."""
    shape, dtype = shape_of(a), dtype_of(a)
    return lambda g: of_dtype(_resized(g, shape), dtype)


def _resized(x: Any, shape: Sequence[int]) -> Any:
    missing = [max(0, n - own) for n, own in zip(shape, x.shape, strict=True)]
    cropped = x[tuple(map(slice, shape))]
    return np.pad(cropped, [(0, n) for n in missing]) if any(missing) else cropped


def _along_one(vjp: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda ans, a, n=None, axis=-1, norm=None: vjp(
        ans, a, None if n is None else (n,), (axis % len(shape_of(a)),), norm
    )


def _along_last_two(vjp: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda ans, a, s=None, axes=(-2, -1), norm=None: vjp(ans, a, s, _axes(a, s, axes), norm)


def _along_all(vjp: Callable[..., Vjp]) -> Callable[..., Vjp]:
    return lambda ans, a, s=None, axes=None, norm=None: vjp(ans, a, s, _axes(a, s, axes), norm)


def _axes(a: Any, s: Any, axes: Any) -> tuple[int, ...]:
    ndim = len(shape_of(a))
    if axes is None:
        axes = range(ndim - (ndim if s is None else len(s)), ndim)
    normalized = tuple(axis % ndim for axis in axes)
    if len(set(normalized)) != len(normalized):
        raise NotImplementedError("the derivative of numpy.fft's functions needs distinct axes")
    return normalized


for _functions, _vjp in (
    ((anp.fft.fft, anp.fft.fft2, anp.fft.fftn), _fft_vjp),
    ((anp.fft.ifft, anp.fft.ifft2, anp.fft.ifftn), _ifft_vjp),
    ((anp.fft.rfft, anp.fft.rfft2, anp.fft.rfftn), _rfft_vjp),
    ((anp.fft.irfft, anp.fft.irfft2, anp.fft.irfftn), _irfft_vjp),
):
    for _function, _along in zip(
        _functions, (_along_one, _along_last_two, _along_all), strict=True
    ):
        derivative(_function, _along(_vjp))

derivative(anp.fft.fftshift, lambda ans, x, axes=None: lambda g: np.fft.ifftshift(g, axes))
derivative(anp.fft.ifftshift, lambda ans, x, axes=None: lambda g: np.fft.fftshift(g, axes))
