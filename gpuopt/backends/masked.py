"""Masked arrays, which are refused everywhere: conversions would ignore their masks."""

from __future__ import annotations

from typing import Any

import numpy as np


def refuse_masked(value: Any, what: str) -> None:
    """Raises TypeError if `value`, called `what` in the message, is a masked array.

    So is a list or tuple with one inside.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array; fill it first, as by array.filled(0)")
    if isinstance(value, list | tuple) and _has_masked(value):
        raise TypeError(f"{what} has a masked array inside; fill it first, as by array.filled(0)")


def _has_masked(values: Any) -> bool:
    # By type first: long lists of numbers are quick to look through.
    types = set(map(type, values))
    if any(issubclass(each, np.ma.MaskedArray) for each in types):
        return True
    return any(issubclass(each, list | tuple) for each in types) and any(
        _has_masked(each) for each in values if isinstance(each, list | tuple)
    )
