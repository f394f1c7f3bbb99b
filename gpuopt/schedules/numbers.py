"""The numbers that a schedule is made from: checked by name, and rounded as TensorFlow does."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable

Real = type[np.float32] | type[np.float64]

# A device reads constants as float64.
_MOST = 2**53


def real_of(value: Any, name: str) -> Real:
    """Returns what is computed in: float64 for a learning rate of float64, else float32."""
    return np.float64 if _scalar(value, name).dtype == np.float64 else np.float32


def number(value: Any, name: str, real: Real) -> Any:
    """Returns a finite number as `real`. Python's floats are rounded to float32 first.

    Raises:
        TypeError: `value` is no number, or one that may change.
        ValueError: it is not finite, or an array.
    """
    rounded = _scalar(value, name)
    exact = isinstance(value, (int, np.integer)) and abs(int(value)) < _MOST
    result: Any = real(value) if exact else ignore_fp_warnings(real, rounded)
    if not np.isfinite(result):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return result


def positive(value: Any, name: str, real: Real) -> Any:
    """Returns a number above 0; see `number`."""
    result = number(value, name, real)
    if not result > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return result


def whole(value: Any, name: str, least: int = 0) -> int:
    """Returns an integer.

    Raises:
        TypeError: `value` is no number, or one that may change.
        ValueError: it is not a whole number from `least` on, or too large for a device.
    """
    _scalar(value, name)
    if not np.isfinite(value) or int(value) != value or not least <= int(value) < _MOST:
        raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
    return int(value)


def flag(value: Any, name: str) -> bool:
    """Returns a truth value."""
    if not isinstance(value, (bool, np.bool_, int)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _scalar(value: Any, name: str) -> np.floating[Any]:
    if isinstance(value, Variable) or callable(value):
        raise TypeError(
            f"{name} must be a number, got {value!r}: a schedule reads its numbers once, and a "
            "function of your own can be a hyperparameter, too"
        )
    return ignore_fp_warnings(as_scalar, value, name)
