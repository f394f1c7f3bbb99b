"""Rows of an embedding table, with a gradient of those rows alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import refuse_masked
from gpuopt.variables.operators import as_constant
from gpuopt.variables.recording import recorder
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable


def embedding_lookup(table: Any, ids: Any) -> Any:
    """Returns `table[ids]`; in a loss, the gradient by a Variable is IndexedSlices.

    Repeated ids appear in the gradient once for each time, and so do several lookups in one table.
    Where the loss also reads the table as a whole, the gradient is dense.

    Args:
        table: A Variable or array, [height, ...].
        ids: Integers of any shape, on the table's device or in host memory. In a loss they are
            copied.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`, or what stands for one in a loss.

    Raises:
        TypeError: `table` is no array, `ids` are not integers, or something is masked.
        IndexError: an id is not a row of the table. On a GPU, ids are not looked at here; see
            `Optimizer.check`.
    """
    refuse_masked(table, "the table")
    if not hasattr(table, "shape"):
        raise TypeError(
            f"table must be a Variable or an array, got {describe(table)}; the call is "
            "embedding_lookup(table, ids)"
        )
    refuse_masked(ids, "ids")
    ids = as_constant(ids)
    if not hasattr(ids, "dtype"):
        ids = np.asarray(ids)
        ids = ids.astype(np.int64) if ids.size == 0 else ids
    elif isinstance(ids, np.generic):
        ids = np.asarray(ids)
    name = f'"{table.name}"' if isinstance(table, Variable) else "the table"
    _check(ids, table.shape[0], name)
    if isinstance(table, Variable):
        table.bring_up(ids)
    by = recorder()
    if by is not None:
        return by.lookup(table, ids)
    return (table.unread_value() if isinstance(table, Variable) else table)[ids]


def _check(ids: Any, height: int, name: str) -> None:
    is_numpy = isinstance(ids, np.ndarray)
    # torch's types are no numpy types.
    dtype = ids.dtype.name if is_numpy else str(ids.dtype).removeprefix("torch.")
    if not dtype.startswith(("int", "uint")):
        raise TypeError(f"ids for {name} must be integers, got {dtype}")
    if is_numpy:
        outside = (ids < 0) | (ids >= height)
        if outside.any():
            raise IndexError(f"id {ids[outside][0]} for {name} is not in [0, {height}), its rows")
