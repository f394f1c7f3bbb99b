"""Hyperparameters: what they may be, how they are rounded, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

# A number, something with a scalar value, or a function without arguments that returns one and is
# called in each step.
Hyperparameter = float | Any | Callable[[], Any]


def as_scalar(value: Any, name: str) -> np.floating[Any]:
    """Rounds a hyperparameter as TensorFlow does.

    Python's numbers become float32; a numpy or device scalar of float64 keeps all its digits.
    (`numpy.float64` is a Python float by inheritance, and yet is not rounded.)

    Raises:
        TypeError: `value` is not a real number.
        ValueError: it is an array of numbers.
    """
    if type(value) is float:
        return np.float32(value)
    if isinstance(value, Variable):
        value = value.numpy()
    array = to_device(value, Device.cpu)
    if array.dtype.kind not in "biuf" and array.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be a number, or a function that returns one, got {value!r}")
    if array.shape != ():
        raise ValueError(f"{name} must be a scalar, got an array of shape {array.shape}")
    keeps_digits = array.dtype == np.float64 and hasattr(value, "dtype")
    return np.float64(array) if keeps_digits else np.float32(array)


def with_all_digits(value: Hyperparameter) -> Hyperparameter:
    """Has `as_scalar` keep all digits of a Python float, also of one that a function returns."""
    if callable(value):
        return lambda: with_all_digits(value())
    return np.float64(value) if type(value) is float else value


def require_positive(**hyperparameters: float) -> None:
    """Refuses the values that TensorFlow refuses, and NaN.

    Raises:
        ValueError: a number is not above 0.
    """
    for name, value in hyperparameters.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive: {value}")


def require_not_negative(**hyperparameters: Hyperparameter) -> None:
    """Refuses the values that TensorFlow refuses, and NaN; functions are not called.

    Raises:
        ValueError: a number is not 0 or above.
    """
    for name, value in hyperparameters.items():
        if not callable(value) and not value >= 0:
            raise ValueError(f"{name} {value} needs to be positive or zero")
