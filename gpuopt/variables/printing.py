"""Prints a variable's value: all of a small one, and the corners of a large one."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.variables.behind import RowsBehind
from gpuopt.variables.identity import Identity

# Elements of a value that is shown in full.
_MOST_SHOWN = 64
# Of each axis of a larger one, so many elements from either end.
_EDGE = 3
_LONGEST_LINE = 80


def format_value(array: Any, identity: Identity, backend: Any, behind: RowsBehind | None) -> str:
    """Returns a variable's value as text, of which a large one's middle is left out.

    On a GPU the host waits once, for the elements that are shown. What keeps them from being read,
    as a fork of the process, is shown in their place.
    """
    try:
        if behind is not None:
            behind.bring_up(_rows_shown(array.shape))
        with backend.enter_reading(identity, kept=(array,)):
            value = backend.to_host(_corners(array) if array.size > _MOST_SHOWN else array)
    except RuntimeError as error:
        return f"({type(error).__name__}: {error})"
    text = np.array2string(
        value,
        max_line_width=10**6,
        separator=", ",
        threshold=_MOST_SHOWN if array.size <= _MOST_SHOWN else 0,
        edgeitems=_EDGE,
    )
    in_one_line = " ".join(text.split()).replace("[ ", "[")
    return in_one_line if len(in_one_line) <= _LONGEST_LINE else f"\n{text}"


def _corners(array: Any) -> Any:
    """Returns the elements that are shown, and one more of each long axis: "..." stands for it."""
    for axis, length in enumerate(array.shape):
        if length > 2 * _EDGE:
            before = (slice(None),) * axis
            ends = array[*before, : _EDGE + 1], array[*before, -_EDGE:]
            array = np.concatenate(ends, axis)
    return array


def _rows_shown(shape: tuple[int, ...]) -> Any:
    """Returns the rows with shown elements; None for a number."""
    if not shape:
        return None
    rows = np.arange(shape[0])
    return rows if shape[0] <= _MOST_SHOWN else np.concatenate([rows[:_EDGE], rows[-_EDGE:]])
