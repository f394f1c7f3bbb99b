"""Hyperparameters: what they may be, and which values are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# A number, something with a scalar value, or a function without arguments that returns one and is
# called in each step.
Hyperparameter = float | Any | Callable[[], Any]


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
