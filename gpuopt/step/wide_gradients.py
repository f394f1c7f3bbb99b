"""Gradients of other types than their variables': sums, unscaled ones, and those of a user."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import are_converted, compute_type
from gpuopt.device import device_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import FLOAT_DTYPES, Variable


class GradientTypes(IntEnum):
    """The types that gradients may have."""

    OWN = 0
    """The variable's."""
    WIDE = 1
    """Also the one that rules compute in."""
    FLOATS = 2
    """Every float."""

    def others(self, dtype: np.dtype[Any]) -> Collection[np.dtype[Any]]:
        """Returns those that gradients of variables of a type may have beside that."""
        if self is GradientTypes.OWN:
            return ()
        return FLOAT_DTYPES if self is GradientTypes.FLOATS else (np.dtype(compute_type(dtype)),)

    def include(self, dtype: np.dtype[Any], variable: Variable) -> bool:
        """Whether a gradient of a variable may have a type."""
        return dtype == variable.dtype or dtype in self.others(variable.dtype)


class TakesGradients(Protocol):
    """The part of an optimizer that `types_of` uses."""

    @property
    def _gradient_types(self) -> GradientTypes: ...


def types_of(optimizer: TakesGradients, takes_wide: bool) -> GradientTypes:
    """Returns the types that gradients of a step may have; see `StepRequest.takes_wide`."""
    return max(optimizer._gradient_types, GradientTypes(takes_wide))


def as_read(array: Any, variable: Variable) -> Any:
    """Returns a gradient's array on the variable's device in a type that loops convert from.

    They convert between types of at most 32 bits. Between others, it is a copy of `wide_dtype`.
    """
    if array.dtype == variable.dtype or are_converted((array.dtype, variable.dtype)):
        return array
    return ignore_fp_warnings(partial(widened, array, variable))


def converted_at_once(gradients: Sequence[Any], dtype: np.dtype[Any]) -> Sequence[Any]:
    """Does what `as_read` does for variables of a dtype, if all gradients are numpy's and alike."""
    given = getattr(gradients[0], "dtype", None)
    if given not in FLOAT_DTYPES or given == dtype or are_converted((given, dtype)):
        return gradients
    if any(type(each) is not np.ndarray or each.dtype != given for each in gradients):
        return gradients
    real = compute_type(dtype)
    return ignore_fp_warnings(lambda: [each.astype(real) for each in gradients])


def wide_dtype(variable: Variable) -> np.dtype[Any]:
    """Returns the dtype that rules compute in, in which gradients are summed."""
    return np.dtype(compute_type(variable.dtype))


def widened(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of `wide_dtype`: a copy, unless it has that dtype."""
    return _cast(gradient, variable, wide_dtype(variable))


def narrowed(gradient: Any, variable: Variable) -> Any:
    """Returns a gradient of its variable's dtype: a rounded copy, unless it has that dtype."""
    return _cast(gradient, variable, variable.dtype)


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


def _cast(gradient: Any, variable: Variable, dtype: np.dtype[Any]) -> Any:
    if isinstance(gradient, IndexedSlices):
        values = _cast(gradient.values, variable, dtype)
        return gradient.replace(values, gradient.indices, variable.shape)
    if gradient is None or gradient.dtype == dtype:
        return gradient
    backend = backend_for(variable.device)
    with backend.enter():
        copy = gradient.astype(dtype)
        backend.hold(gradient)
        return copy
