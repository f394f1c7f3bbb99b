"""Groups a sparse gradient's rows by their index, and adds up each group, in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.row_order import PIECE, PIECES_PER_STRETCH

Array = np.ndarray[Any, Any]

# Adding up one group's values on its own takes this many numpy calls. Adding one value to each of
# the other groups takes one call.
_CALLS_PER_GROUP = 3

_KEY_BITS = 63


class RowGroups(NamedTuple):
    """Which positions belong to which row; contiguous arrays of int64.

    Attributes:
        rows: [num_unique], each once.
        positions: [num_rows]; those of one row follow each other, in order of appearance.
        begins: [num_unique + 1]: row k has positions[begins[k] : begins[k + 1]].
        firsts: [num_unique]: which sorted position of the call the first of them is; see
            `gpuopt.backends.row_order`.
    """

    rows: Array
    positions: Array
    begins: Array
    firsts: Array


def group_rows(indices: Array, first: int = 0) -> RowGroups:
    """Groups the positions of a vector of non-negative integers by value; rows are ascending.

    `first` is the sorted position of the least integer.
    """
    size = len(indices)
    positions, rows = _sorted(indices)
    is_first = np.empty(size, bool)
    is_first[:1] = True
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    begins = np.flatnonzero(is_first)
    return RowGroups(rows.take(begins), positions, np.append(begins, size), begins + first)


def sum_rows(values: Array, groups: RowGroups) -> tuple[Array, Array]:
    """Adds up each row's values, [num_rows, ...], in the order of `gpuopt.backends.row_order`.

    Returns:
        (sums, order): sums[k] belongs to groups.rows[order[k]].
    """
    return _sum_by_parts(values, *groups[1:], [PIECE, PIECES_PER_STRETCH])


def _sum_by_parts(
    values: Array, positions: Array, begins: Array, firsts: Array, sizes: Sequence[int]
) -> tuple[Array, Array]:
    """Adds up each group's values by parts, and then the parts' sums likewise.

    Args:
        values: [num_rows, ...] in the type to add in.
        positions: Which of them belong to the groups; those of one group follow each other.
        begins: [num_groups + 1]: where in `positions` each group begins, and the end.
        firsts: [num_groups]: the number of each group's first value; the next values have the
            next numbers.
        sizes: Values whose numbers have the same quotient by the first size are one part, and that
            quotient is the part's number. Parts are divided alike by the next size. After the
            last size, sums are added up one after the other.

    Returns:
        (sums, order): sums[k] is of group order[k].
    """
    if not sizes:
        return _sum_one_by_one(values, positions, begins)
    size, *others = sizes
    numbers = firsts // size
    counts = (firsts + np.diff(begins) - 1) // size - numbers + 1
    if counts.max(initial=1) == 1:
        return _sum_one_by_one(values, positions, begins)
    group_of = np.repeat(np.arange(len(counts)), counts)
    part_of = np.arange(len(group_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    ahead = (numbers.take(group_of) + part_of) * size - firsts.take(group_of)
    part_begins = begins.take(group_of) + np.maximum(ahead, 0)
    sums, order = _sum_one_by_one(values, positions, np.append(part_begins, begins[-1]))
    where = np.empty_like(order)
    where[order] = np.arange(len(order))
    # The sum of a group of several parts takes the place of its first part's.
    several = np.flatnonzero(counts > 1)
    rest = where[counts.take(group_of) > 1]
    rest_begins = np.append(0, np.cumsum(counts.take(several)))
    totals, order_of_totals = _sum_by_parts(sums, rest, rest_begins, numbers.take(several), others)
    sums[rest.take(rest_begins.take(order_of_totals))] = totals
    is_first = part_of.take(order) == 0
    return sums[is_first], group_of.take(order[is_first])


def _sum_one_by_one(values: Array, positions: Array, begins: Array) -> tuple[Array, Array]:
    """Does what `_sum_by_parts` does, without parts. Frequent groups come first."""
    counts = np.diff(begins)
    order = stable_order(counts.max(initial=0) - counts)
    counts, begins = counts.take(order), begins.take(order)
    few = _frequent(counts)
    # Of all groups but the frequent ones: the first values, then the second ones, and so on.
    occurrences = np.arange(counts[few] if few < len(counts) else 0)
    sizes = np.searchsorted(-counts[few:], -occurrences)
    ends = np.cumsum(sizes)
    at = begins[few:].take(np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes))
    at += np.repeat(occurrences, sizes)
    gathered = np.empty((few + len(at), *values.shape[1:]), values.dtype)
    # mode="clip" skips a check, and with it a copy; positions are always within range.
    values.take(positions.take(at), axis=0, out=gathered[few:], mode="clip")
    sums, others = gathered[: len(counts)], gathered[few:]
    for size, end in zip(sizes[1:].tolist(), ends[1:].tolist(), strict=True):
        others[:size] += others[end - size : end]
    for group in range(few):
        mine = positions[begins[group] : begins[group] + counts[group]]
        sums[group] = _sum_in_order(values.take(mine, axis=0, mode="clip"))
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
    """Returns how many groups, of descending `counts`, are best added up one by one."""
    calls = np.append(counts, 0)
    calls += _CALLS_PER_GROUP * np.arange(len(calls))
    return int(np.argmin(calls))


def _sum_in_order(values: Array) -> Array:
    if values[0].size == 1:
        # numpy adds up a vector in pairs, and its running sums one by one.
        last: Array = np.add.accumulate(values, axis=0)[-1]
        return last
    # Along the first of several axes, numpy adds one row after the other. It would begin with 0,
    # to which -0 is lost.
    total: Array = np.add.reduce(values, axis=0, initial=-0.0)
    return total
