"""Rows of an embedding table, with a gradient of those rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.recording import recorder
from gpuopt.variable import Variable


def embedding_lookup(table: Any, ids: Any) -> Any:
    """Returns `table[ids]`; in a loss, the gradient by a Variable is IndexedSlices.

    Repeated ids appear in the gradient once for each time, and so do several lookups in one table.
    Where the loss also reads the table as a whole, the gradient is dense.

    Args:
        table: A Variable or array, [height, ...].
        ids: Integers of any shape, on the table's device or in host memory.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`, or what stands for one in a loss.

    Raises:
        TypeError: `ids` are not integers.
        IndexError: an id is not a row of the table.
    """
    if isinstance(ids, list | tuple | int):
        ids = np.asarray(ids, np.int64)
    if isinstance(ids, np.ndarray):
        _check(ids, table)
    by = recorder()
    if by is not None:
        return by.lookup(table, ids)
    return (table.storage if isinstance(table, Variable) else table)[ids]


def _check(ids: np.ndarray[Any, Any], table: Any) -> None:
    name = f'"{table.name}"' if isinstance(table, Variable) else "the table"
    if ids.dtype.kind not in "iu":
        raise TypeError(f"ids for {name} must be integers, got {ids.dtype}")
    height = table.shape[0]
    outside = (ids < 0) | (ids >= height)
    if outside.any():
        raise IndexError(f"id {ids[outside][0]} for {name} is not in [0, {height}), its rows")
