"""What is written to a variable: checked, and brought to its device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from gpuopt.backends import backend_for, refuse_masked, to_device
from gpuopt.device import Device
from gpuopt.variables.operators import reading, storage_of


class Written(Protocol):
    """The part of a variable that these checks use."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def memory(self) -> Device: ...


def checked_operand(variable: Written, value: Any) -> Any:
    """Returns what is about to be written; Python's numbers take the variable's type.

    Raises:
        ValueError, TypeError: see `Variable.assign`.
    """
    array = _on_its_device(variable, value)
    check_shape(variable, array)
    _check_dtype(variable, array)
    return array


def check_shape(variable: Written, array: Any) -> None:
    """Raises ValueError for an array of another shape."""
    if array.shape != variable.shape:
        raise ValueError(
            f'"{variable.name}" has shape {variable.shape}; the value has shape {array.shape}'
        )


def checked_rows(variable: Written, values: Any, num_rows: int | None) -> Any:
    """Returns rows for a variable, as a new array of its dtype on its device.

    Args:
        variable: What they are for.
        values: [num_rows, ...], of a type as in `Variable.assign`.
        num_rows: How many there must be; None for any number.

    Raises:
        ValueError, TypeError: they do not fit.
    """
    with reading(values):
        array = _on_its_device(variable, values)
        of_row = variable.shape[1:]
        fits = array.ndim > 0 and array.shape[1:] == of_row and num_rows in (None, array.shape[0])
        if not fits:
            rows = "rows" if num_rows is None else f"{num_rows} rows"
            raise ValueError(
                f'values for {rows} of "{variable.name}", which have shape {of_row} each: got '
                f"values of shape {array.shape}"
            )
        _check_dtype(variable, array)
        return backend_for(variable.memory).full(array.shape, variable.dtype, array)


def _on_its_device(variable: Written, value: Any) -> Any:
    array = storage_of(value)
    refuse_masked(array, f'the value for "{variable.name}"')
    if not hasattr(array, "dtype"):
        try:
            given = array = np.asarray(array)
        except ValueError as error:  # lists of several lengths
            raise ValueError(f'the value for "{variable.name}": {error}') from error
        if array.dtype.kind in "OSU":
            raise TypeError(
                f'the value for "{variable.name}" must hold numbers, got {type(value).__name__}'
            )
        if array.dtype.kind in ("biu" if variable.dtype.kind in "iu" else "biuf"):
            array = array.astype(variable.dtype)
            if variable.dtype.kind in "iu" and np.any(array != given):
                raise ValueError(
                    f'the value for "{variable.name}" does not fit into {variable.dtype}'
                )
    try:
        return to_device(array, variable.memory)
    except TypeError as error:
        raise TypeError(f'the value for "{variable.name}": {error}') from error


def _check_dtype(variable: Written, array: Any) -> None:
    if not np.can_cast(array.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f'"{variable.name}" has dtype {variable.dtype}; the value has dtype {array.dtype}'
        )
