"""Adds up rows that share an index, in order of appearance, in host memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# With fewer rows than this still receiving, one call for each of them is quicker than one for all
# of them at each occurrence.
_FEW_ROWS = 16


class SortedRows(NamedTuple):
    """Which positions belong to which row.

    Attributes:
        rows: [num_unique], ascending.
        positions: [num_rows]; those of one row follow each other, in order of appearance.
        starts: [num_unique + 1]: row k has positions[starts[k] : starts[k + 1]].
    """

    rows: Array
    positions: Array
    starts: Array


def sort_rows(indices: Array) -> SortedRows:
    """Groups the positions of a vector of non-negative integers by value."""
    size = len(indices)
    bits = size.bit_length()
    highest = int(indices.max(initial=0))
    if highest.bit_length() + bits < 64:
        # One sort of row and position together: quicker than a stable sort of rows.
        keys = indices.astype(np.int64) << bits
        keys |= np.arange(size)
        keys.sort()
        rows, positions = keys >> bits, keys & ((1 << bits) - 1)
    else:
        positions = np.argsort(indices, kind="stable")
        rows = indices[positions]
    is_first = np.empty(size, bool)
    is_first[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    return SortedRows(rows[starts], positions, np.append(starts, size))


def sum_rows(values: Array, grouped: SortedRows) -> tuple[Array, Array]:
    """Adds up each row's values, one after the other.

    Args:
        values: [num_rows, ...] in the type to add in.
        grouped: From `sort_rows`.

    Returns:
        (sums, order): sums[k] belongs to grouped.rows[order[k]]. Frequent rows come first.
    """
    counts = np.diff(grouped.starts)
    order = np.argsort(-counts, kind="stable")
    counts, starts = counts[order], grouped.starts[order]
    # mode="clip" skips a check, and with it a copy; positions are always within range.
    sums = values.take(grouped.positions[starts], axis=0, mode="clip")
    occurrence = 1
    remaining = int(np.count_nonzero(counts > occurrence))
    while remaining >= _FEW_ROWS:
        positions = grouped.positions[starts[:remaining] + occurrence]
        sums[:remaining] += values.take(positions, axis=0, mode="clip")
        occurrence += 1
        remaining = int(np.searchsorted(-counts[:remaining], -occurrence))
    for row in range(remaining):
        positions = grouped.positions[starts[row] : starts[row] + counts[row]]
        sums[row] = _sum_in_order(values.take(positions, axis=0, mode="clip"))
    return sums, order


def _sum_in_order(values: Array) -> Array:
    if values[0].size == 1:
        # numpy adds up a vector in pairs, and its running sums one by one.
        last: Array = np.add.accumulate(values, axis=0)[-1]
        return last
    # Along the first of several axes, numpy adds one row after the other.
    total: Array = np.add.reduce(values, axis=0)
    return total
