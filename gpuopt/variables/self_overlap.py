"""Refuses arrays whose elements share memory, such as sliding windows, as variables."""

from __future__ import annotations

from typing import Any

import numpy as np


def refuse_self_overlap(layout: np.ndarray[Any, Any]) -> None:
    """Raises ValueError for an array with several elements on the same memory.

    An update would count once for each of them, or only once, as it is computed.

    Args:
        layout: An array of this shape, strides and item size; its elements are not looked at.
    """
    if not layout.flags.forc and _overlaps_itself(layout):
        raise ValueError(
            f"the array of shape {layout.shape} and strides {layout.strides} has several elements "
            "on the same memory, so it cannot be updated; pass the array that it is a view of, or "
            "a copy"
        )


def _overlaps_itself(layout: np.ndarray[Any, Any]) -> bool:
    steps = sorted(
        (abs(stride), length)
        for stride, length in zip(layout.strides, layout.shape, strict=True)
        if length > 1
    )
    extent = layout.itemsize
    is_nested = True  # each step reaches beyond all that the smaller ones span
    for stride, length in steps:
        is_nested &= stride >= extent
        extent += stride * (length - 1)
    if is_nested:
        return False
    if layout.nbytes > extent:
        return True
    offsets = np.zeros(1, np.int64)
    for stride, length in steps:
        offsets = np.add.outer(offsets, stride * np.arange(length)).reshape(-1)
    return bool((np.diff(np.sort(offsets)) < layout.itemsize).any())
