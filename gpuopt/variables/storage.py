"""A variable's array: a copy of the user's value, or the user's own memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import backend_for, new_storage, refuse_masked
from gpuopt.device import Device, device_of
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.variables.identity import refuse_self_overlap
from gpuopt.variables.operators import storage_of

# TensorFlow's types for Python's numbers.
_PYTHON_NUMBER_DTYPES = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.complex128): np.dtype(np.complex64),
}


def copy_value(value: Any, name: str, dtype: Any, device: Device) -> Any:
    """Returns new storage on `device` with a value, as `Variable` describes it.

    Args:
        value: A Variable, an array, nested lists, or a number.
        name: For errors.
        dtype: The storage's; None for the value's own.
        device: Where the storage is wanted.

    Raises:
        TypeError: the value does not hold numbers, or is masked, or `dtype` is no type.
        ValueError: Python's numbers do not fit into `dtype`, or TensorFlow's type for them; or
            lists have several lengths.
    """
    given = storage_of(value)
    source = device_of(given)
    refuse_masked(given, f'the value of "{name}"')
    try:
        array = backend_for(source).as_array(given)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f'the value of "{name}": {error}') from error
    _check_holds_numbers(array, name, value)
    is_typed = hasattr(value, "dtype") or _holds_numpy_numbers(value)
    if dtype is not None:
        target = _checked_dtype(dtype, name)
    elif is_typed:
        target = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    else:
        target = _PYTHON_NUMBER_DTYPES.get(array.dtype, array.dtype)
    may_be_cut = not is_typed and target.kind in "iu" and array.dtype.kind in "iuf"
    if may_be_cut and np.any(array != ignore_fp_warnings(array.astype, target)):
        raise ValueError(f'the value of "{name}" does not fit into {target}: pass another dtype')
    return new_storage(array, device, target)


def adopt_array(value: Any, name: str, dtype: Any, device: Device) -> Any:
    """Returns a new view of the array, after checks that it can be a variable's.

    Args:
        value: What the user passes as the array.
        name: For errors.
        dtype: The dtype that the array must have; None for any.
        device: The device that the array must be on.

    Raises:
        TypeError: the value is no array of numpy or CuPy, is masked, or does not hold numbers.
        ValueError: the array is read-only, overlaps itself, or has another dtype or device.
    """
    source = device_of(value)
    backend_for(device)
    backend = backend_for(source)
    refuse_masked(value, f'"{name}"')
    array = backend.plain_array(value)
    if array is None:
        raise TypeError(
            f'"{name}": copy=False adopts an array of numpy or CuPy, got {describe(value)}'
            f"{hint_for_foreign(value)}"
        )
    layout = backend.layout(array)
    if not layout.flags.writeable:
        raise ValueError(f'"{name}": a read-only array cannot be adopted; use copy=True')
    if dtype is not None and array.dtype != (wanted := _checked_dtype(dtype, name)):
        raise ValueError(
            f'"{name}": copy=False cannot turn {array.dtype} into {wanted}; use copy=True'
        )
    if source != device:
        raise ValueError(f'"{name}": copy=False cannot move from {source} to {device}')
    _check_holds_numbers(array, name, value)
    try:
        refuse_self_overlap(layout)
    except ValueError as error:
        raise ValueError(f'"{name}": {error}') from None
    # The caller may give the array another dtype or shape in place: a variable keeps its own.
    with backend.enter():
        return array.view()


def describe(value: Any) -> str:
    """Returns a value's type, with its dtype if it has one, for errors."""
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + ("" if dtype is None else f" of dtype {dtype}")


def hint_for_foreign(value: Any) -> str:
    """Says how another library's array becomes a variable; nothing for what is no such array."""
    if not hasattr(value, "__dlpack__"):
        return ""
    return (
        "; for another library's array, make gpuopt.Variable(view, copy=False) once, where view is "
        "numpy's or CuPy's array on the same memory, as by from_dlpack"
    )


def holds_numbers(array: Any) -> bool:
    """Whether an array is of a type that a variable can have."""
    return array.dtype.kind not in "OSUMm" and not array.dtype.names


def _checked_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(f'the dtype of "{name}" must be one of numpy\'s: {error}') from None
    return checked


def _check_holds_numbers(array: Any, name: str, value: Any) -> None:
    if not holds_numbers(array):
        raise TypeError(f'the value of "{name}" must hold numbers, got {describe(value)}')


def _holds_numpy_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_numpy_numbers, value))
    return hasattr(value, "dtype")
