"""Groups a sparse gradient's rows by their index, and adds up each group, in host memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# Adding up one row's values on its own takes this many numpy calls. Adding one value to each of the
# other rows takes one call.
_CALLS_PER_ROW = 3

_KEY_BITS = 63


class RowGroups(NamedTuple):
    """Which positions belong to which row; contiguous arrays of int64.

    Attributes:
        rows: [num_unique], each once.
        positions: [num_rows]; those of one row follow each other, in order of appearance.
        begins: [num_unique + 1]: row k has positions[begins[k] : begins[k + 1]].
    """

    rows: Array
    positions: Array
    begins: Array


def group_rows(indices: Array) -> RowGroups:
    """Groups the positions of a vector of non-negative integers by value; rows are ascending."""
    size = len(indices)
    positions, rows = _sorted(indices)
    is_first = np.empty(size, bool)
    is_first[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    begins = np.flatnonzero(is_first)
    return RowGroups(rows.take(begins), positions, np.append(begins, size))


def sum_rows(values: Array, groups: RowGroups) -> tuple[Array, Array]:
    """Adds up each row's values, one after the other.

    Args:
        values: [num_rows, ...] in the type to add in.
        groups: From `group_rows`.

    Returns:
        (sums, order): sums[k] belongs to groups.rows[order[k]]. Frequent rows come first.
    """
    counts = np.diff(groups.begins)
    order = stable_order(counts.max(initial=0) - counts)
    counts, begins = counts.take(order), groups.begins.take(order)
    few = _frequent(counts)
    # Of all rows but the frequent ones: the first values, then the second ones, and so on.
    occurrences = np.arange(counts[few] if few < len(counts) else 0)
    sizes = np.searchsorted(-counts[few:], -occurrences)
    ends = np.cumsum(sizes)
    at = begins[few:].take(np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes))
    at += np.repeat(occurrences, sizes)
    gathered = np.empty((few + len(at), *values.shape[1:]), values.dtype)
    # mode="clip" skips a check, and with it a copy; positions are always within range.
    values.take(groups.positions.take(at), axis=0, out=gathered[few:], mode="clip")
    sums, others = gathered[: len(counts)], gathered[few:]
    for size, end in zip(sizes[1:].tolist(), ends[1:].tolist(), strict=True):
        others[:size] += others[end - size : end]
    for row in range(few):
        positions = groups.positions[begins[row] : begins[row] + counts[row]]
        sums[row] = _sum_in_order(values.take(positions, axis=0, mode="clip"))
    return sums, order


def stable_order(numbers: Array) -> Array:
    """Returns the positions of non-negative integers in ascending order; equal ones keep theirs."""
    return _sorted(numbers)[0]


def _sorted(numbers: Array) -> tuple[Array, Array]:
    """Returns the positions of non-negative integers in ascending order, and the sorted integers.

    Both are of int64.
    """
    size = len(numbers)
    bits = size.bit_length()
    if int(numbers.max(initial=0)).bit_length() + bits > _KEY_BITS:
        order = np.argsort(numbers, kind="stable")
        return order, numbers.take(order).astype(np.int64, copy=False)
    # numpy sorts numbers by vector instructions, several times quicker than it finds their order.
    # With its position behind it, no number is equal to another.
    keys = numbers.astype(np.int64)
    keys <<= bits
    keys += np.arange(size)
    keys.sort()
    order = keys & ((1 << bits) - 1)
    keys >>= bits
    return order, keys


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
