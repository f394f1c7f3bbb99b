"""Divides gradients by the scale of their loss."""

from __future__ import annotations

from typing import Any

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.device import device_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.variables.indexed_slices import IndexedSlices


def unscaled(gradient: Any, factor: Any) -> Any:
    """Returns a new gradient, the product with a factor.

    It has the type that rules compute in: of 16 bits, what was scaled would vanish again.

    Args:
        gradient: An array of any device, or IndexedSlices; it is only read.
        factor: A number, or a scalar array of the gradient's device.
    """
    if isinstance(gradient, IndexedSlices):
        values = unscaled(gradient.values, factor)
        return IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def multiply() -> Any:
        real = compute_type(gradient.dtype)
        is_array = hasattr(factor, "astype")
        at_once = factor.astype(real, copy=False) if is_array else real(factor)
        return gradient.astype(real, copy=False) * at_once

    backend = backend_for(device_of(gradient))
    with backend.enter():
        product = ignore_fp_warnings(multiply)
        backend.hold(gradient, factor)
        return product
