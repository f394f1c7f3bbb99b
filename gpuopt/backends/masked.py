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
    waiting, seen = [values], set()  # a list may hold itself
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        # By type first: long lists of numbers are quick to look through.
        types = set(map(type, each))
        if any(issubclass(kind, np.ma.MaskedArray) for kind in types):
            return True
        if any(issubclass(kind, list | tuple) for kind in types):
            waiting.extend(inner for inner in each if isinstance(inner, list | tuple))
    return False
