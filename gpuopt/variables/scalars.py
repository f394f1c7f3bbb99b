"""Scalars that users give: numbers, and arrays and Variables of one element."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.variables.variable import FLOAT_DTYPES, Variable


def as_scalar(value: Any, name: str) -> np.floating[Any]:
    """Rounds a number as TensorFlow does.

    Python's numbers become float32; a numpy or device scalar of float64 keeps all its digits.
    (`numpy.float64` is a Python float by inheritance, and yet is not rounded.)

    Raises:
        TypeError: `value` is not a real number; True and False are none.
        ValueError: it is an array of numbers.
    """
    if type(value) is float:
        return np.float32(value)
    if isinstance(value, Variable):
        value = value.numpy()
    array = to_device(value, Device.cpu)
    if array.dtype.kind not in "iuf" and array.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be a number, or a function that returns one, got {value!r}")
    if array.shape != ():
        raise ValueError(f"{name} must be a scalar, got an array of shape {array.shape}")
    keeps_digits = array.dtype == np.float64 and hasattr(value, "dtype")
    return np.float64(array) if keeps_digits else np.float32(array)


def step_number(value: Any, name: str) -> int:
    """Returns the number of a step: a whole number, from 0.

    Raises:
        TypeError: `value` is not a real number; True and False are none.
        ValueError: it is an array of numbers, or is not whole, or is below 0.
    """
    # Python's and numpy's integers keep all their digits.
    number = value.numpy() if isinstance(value, Variable) else to_device(value, Device.cpu)
    if number.dtype.kind not in "iuf" and number.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be a whole number from 0, got {value!r}")
    if number.shape != ():
        raise ValueError(f"{name} must be a scalar, got an array of shape {number.shape}")
    if not np.isfinite(number) or number != int(number) or number < 0:
        raise ValueError(f"{name} must be a whole number from 0, got {value!s}")
    return int(number)


def check_bool(value: Any, name: str) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
