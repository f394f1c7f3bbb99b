"""Adds up rows that share an index, in order of appearance, in host memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# Adding up one row's values apart takes as many calls as adding to all rows this many times.
_CALLS_PER_ROW = 3


class SortedRows(NamedTuple):
    """Which positions belong to which row; contiguous arrays of int64.

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
    positions = stable_order(indices)
    rows = indices.take(positions).astype(np.int64, copy=False)
    is_first = np.empty(size, bool)
    is_first[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    return SortedRows(rows.take(starts), positions, np.append(starts, size))


def sum_rows(values: Array, grouped: SortedRows) -> tuple[Array, Array]:
    """Adds up each row's values, one after the other.

    Args:
        values: [num_rows, ...] in the type to add in.
        grouped: From `sort_rows`.

    Returns:
        (sums, order): sums[k] belongs to grouped.rows[order[k]]. Frequent rows come first.
    """
    counts = np.diff(grouped.starts)
    order = stable_order(counts.max(initial=0) - counts)
    counts, starts = counts.take(order), grouped.starts.take(order)
    few = _frequent(counts)
    # The others' first values, then their second ones where there are any, and so on.
    occurrences = np.arange(counts[few] if few < len(counts) else 0)
    sizes = np.searchsorted(-counts[few:], -occurrences)
    ends = np.cumsum(sizes)
    at = starts[few:].take(np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes))
    at += np.repeat(occurrences, sizes)
    gathered = np.empty((few + len(at), *values.shape[1:]), values.dtype)
    # mode="clip" skips a check, and with it a copy; positions are always within range.
    values.take(grouped.positions.take(at), axis=0, out=gathered[few:], mode="clip")
    sums, others = gathered[: len(counts)], gathered[few:]
    for size, end in zip(sizes[1:].tolist(), ends[1:].tolist(), strict=True):
        others[:size] += others[end - size : end]
    for row in range(few):
        positions = grouped.positions[starts[row] : starts[row] + counts[row]]
        sums[row] = _sum_in_order(values.take(positions, axis=0, mode="clip"))
    return sums, order


def stable_order(numbers: Array) -> Array:
    """Returns what sorts non-negative integers; equal ones keep their order."""
    # numpy sorts 16 bits in linear time: digit by digit is several times quicker than at once.
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(16, int(numbers.max(initial=0)).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order.take(np.argsort(digits.take(order), kind="stable"))
    return order


def _frequent(counts: Array) -> int:
    """Returns how many rows, the most frequent ones, are best added up one by one.

    Args:
        counts: How often each row occurs, descending.
    """
    calls = np.append(counts, 0)
    calls += _CALLS_PER_ROW * np.arange(len(calls))
    return int(np.argmin(calls))


def _sum_in_order(values: Array) -> Array:
    if values[0].size == 1:
        # numpy adds up a vector in pairs, and its running sums one by one.
        last: Array = np.add.accumulate(values, axis=0)[-1]
        return last
    # Along the first of several axes, numpy adds one row after the other.
    total: Array = np.add.reduce(values, axis=0)
    return total
