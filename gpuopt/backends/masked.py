"""Masked arrays, which are refused everywhere: conversions would ignore their masks."""

from __future__ import annotations

from typing import Any

import numpy as np


def refuse_masked(value: Any, what: str) -> None:
    """Raises TypeError if `value`, called `what` in the message, is a masked array."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array; fill it first, as by array.filled(0)")
