"""What a (gradient, variable) pair must be before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends import backend_for
from gpuopt.device import device_of
from gpuopt.errors import DeviceUnavailableError
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.variable import Variable, as_variable

Gradient: TypeAlias = "Any | IndexedSlices"

# np.shares_memory solves a small integer program; interleaved views need little work.
_OVERLAP_WORK = 100_000


def checked_pairs(
    grads_and_vars: Iterable[tuple[Any, Any]], valid_dtypes: Set[np.dtype[Any]]
) -> list[tuple[Gradient | None, Variable]]:
    """Turns what a user passes to `apply_gradients` into pairs that can be applied.

    Returns:
        Pairs in the given order. A gradient is None, an array of its variable's shape and dtype,
        or IndexedSlices whose rows fit the variable.

    Raises:
        ValueError, TypeError, IndexError, RuntimeError, DeviceUnavailableError: something does not
            fit; the message names the variable.
    """
    try:
        given = list(grads_and_vars)
    except TypeError as error:
        raise TypeError(
            "grads_and_vars must be an iterable of (gradient, variable) pairs, got "
            f"{type(grads_and_vars).__name__}"
        ) from error
    if not given:
        raise ValueError("No variables provided.")
    unchecked = [
        pair
        if type(pair) is tuple and len(pair) == 2 and isinstance(pair[1], Variable)
        else _unpacked(position, pair)
        for position, pair in enumerate(given)
    ]
    if all(gradient is None for gradient, _ in unchecked):
        names = [variable.name for _, variable in unchecked]
        raise ValueError(f"No gradients provided for any variable: {names}.")
    pairs: list[tuple[Gradient | None, Variable]] = []
    valid_dtype = None
    for pair in unchecked:
        gradient, variable = pair
        storage = variable.storage
        # Most gradients are told to be right in no time: a model may have thousands.
        if not (
            gradient is None
            or (
                type(gradient) is np.ndarray
                and type(storage) is np.ndarray
                and gradient.dtype is storage.dtype is valid_dtype
                and gradient.shape == storage.shape
            )
        ):
            pair = _checked_gradient(gradient, variable, valid_dtypes), variable
            valid_dtype = storage.dtype
        pairs.append(pair)
    refuse_shared_memory([variable for gradient, variable in pairs if gradient is not None])
    return pairs


def _unpacked(position: int, pair: Any) -> tuple[Any, Variable]:
    try:
        gradient, variable = pair
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"grads_and_vars[{position}] must be a (gradient, variable) pair, got {pair!r}"
        ) from error
    try:
        return gradient, as_variable(variable)
    except (TypeError, ValueError, DeviceUnavailableError) as error:
        raise type(error)(f"variable of grads_and_vars[{position}]: {error}") from error


def _checked_gradient(
    gradient: Any, variable: Variable, valid_dtypes: Set[np.dtype[Any]]
) -> Gradient:
    if variable.dtype not in valid_dtypes:
        expected = sorted(str(dtype) for dtype in valid_dtypes)
        raise ValueError(
            f'Invalid type {variable.dtype} for "{variable.name}", expected: {expected}.'
        )
    if isinstance(gradient, IndexedSlices):
        return _checked_slices(gradient, variable)
    array = _as_gradient_array(gradient, variable)
    if array.shape != variable.shape:
        raise ValueError(
            f'gradient for "{variable.name}" has shape {array.shape}; the variable has shape '
            f"{variable.shape}. For a gradient of some rows, pass IndexedSlices(values, indices)."
        )
    return array


def _checked_slices(slices: IndexedSlices, variable: Variable) -> IndexedSlices:
    name, shape = variable.name, variable.shape
    if variable.constraint is not None:
        raise RuntimeError(
            f'Cannot use a constraint function on a sparse variable: "{name}" has a constraint and '
            "its gradient is IndexedSlices."
        )
    if variable.ndim == 0:
        raise ValueError(f'gradient for "{name}" is IndexedSlices, but a scalar has no rows')
    values = _on_device(slices.values, variable)
    indices = _on_device(slices.indices, variable)
    _check_dtype(values, variable)
    if values.shape[1:] != shape[1:]:
        raise ValueError(
            f'gradient for "{name}" has rows of shape {values.shape[1:]} (values {values.shape}); '
            f"the variable has rows of shape {shape[1:]} (shape {shape})"
        )
    if slices.dense_shape is not None and slices.dense_shape != shape:
        raise ValueError(
            f'gradient for "{name}" has dense_shape {slices.dense_shape}; the variable has shape '
            f"{shape}"
        )
    outside = (indices < 0) | (indices >= shape[0])
    if outside.any():
        offset = int(outside.argmax())
        raise IndexError(
            f'gradient for "{name}": indices[{offset}] = {indices[offset]} is not in '
            f"[0, {shape[0]}), the variable's rows"
        )
    return IndexedSlices(values, indices, shape)


def _as_gradient_array(gradient: Any, variable: Variable) -> Any:
    gradient = gradient.storage if isinstance(gradient, Variable) else gradient
    if hasattr(gradient, "dtype"):
        array = _on_device(gradient, variable)
        _check_dtype(array, variable)
        return array
    try:
        array = np.asarray(gradient)
    except ValueError as error:  # a ragged list
        raise ValueError(f'gradient for "{variable.name}": {error}') from error
    if array.dtype.kind not in "bif":
        raise TypeError(
            "Gradient must be convertible to an array or IndexedSlices, or None: gradient for "
            f'"{variable.name}" is {gradient!r}'
        )
    return array.astype(variable.dtype)  # Python's numbers have no type of their own


def _on_device(array: Any, variable: Variable) -> Any:
    device = device_of(array)
    if device != variable.device:
        try:
            backend_for(device)
        except DeviceUnavailableError as error:
            raise DeviceUnavailableError(
                f'gradient for "{variable.name}" is on {device}, the variable on '
                f"{variable.device}: {error}"
            ) from error
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f'gradient for "{variable.name}" is a masked array; fill it first')
    return np.asarray(array)


def _check_dtype(array: Any, variable: Variable) -> None:
    if array.dtype != variable.dtype:
        raise TypeError(
            f'gradient for "{variable.name}" has dtype {array.dtype}; the variable has dtype '
            f"{variable.dtype}. Nothing is cast silently: use gradient.astype(...)."
        )


def refuse_shared_memory(variables: list[Variable]) -> None:
    """Raises ValueError where two updates of one memory would depend on their order."""
    if all(variable.owns_memory for variable in variables) and (
        len({variable.identity for variable in variables}) == len(variables)
    ):
        return
    spans = sorted(
        (*byte_bounds(variable.storage), position)
        for position, variable in enumerate(variables)
        if variable.size
    )
    reach = 0  # of the spans so far, the one that ends last
    for position in range(1, len(spans)):
        if spans[position - 1][1] > spans[reach][1]:
            reach = position - 1
        start = spans[position][0]
        if start >= spans[reach][1]:
            continue
        later = variables[spans[position][2]]
        for earlier_start, earlier_end, earlier_position in spans[:position]:
            earlier = variables[earlier_position]
            if earlier_start <= start < earlier_end and _share_memory(earlier, later):
                same = earlier.identity is later.identity
                what = "appears twice" if same else f'shares memory with "{earlier.name}"'
                raise ValueError(
                    f'"{later.name}" {what}: memory can be updated only once in a call; add the '
                    "gradients up first"
                )


def _share_memory(one: Variable, other: Variable) -> bool:
    try:
        return np.shares_memory(one.storage, other.storage, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
