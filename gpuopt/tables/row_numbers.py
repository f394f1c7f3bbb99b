"""Row numbers from a caller's numbers or mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import refuse_masked, to_device
from gpuopt.device import Device
from gpuopt.variables.operators import reading, storage_of

Array = np.ndarray[Any, Any]


def row_numbers(rows: Any, height: int, what: str) -> Array:
    """Returns the numbers of rows, int64, in host memory, for which the host waits.

    Args:
        rows: Numbers in any order, or [height] bool; on any device, a Variable, or a list.
        height: How many rows there are.
        what: What the rows are, for errors.

    Raises:
        TypeError: `rows` holds something else than integers or bool, or is masked.
        ValueError: it is no vector, or a mask of another length.
        IndexError: there is no such row.
    """
    refuse_masked(storage_of(rows), what)
    with reading(rows):
        given = storage_of(rows)
        array = np.asarray(to_device(given, Device.cpu) if hasattr(given, "dtype") else given)
    if array.ndim != 1:
        raise ValueError(f"{what} must be a vector, got shape {array.shape}")
    if array.dtype == bool:
        if array.size != height:
            raise ValueError(
                f"{what} are given by a mask of {array.size} elements for {height} rows; it must "
                "have one for each"
            )
        return np.flatnonzero(array)
    if array.size == 0 and not hasattr(given, "dtype"):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, or a mask of bool, got dtype {array.dtype}")
    outside = (array < 0) | (array >= height)
    if outside.any():
        offset = int(outside.argmax())
        raise IndexError(f"{what}: [{offset}] = {array[offset]} is not in [0, {height})")
    return array.astype(np.int64)
