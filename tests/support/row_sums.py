"""The documented order in which a row's gradients are added up, one number after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

PIECE, STRETCH = 32, 512


def sum_by_cuts(values: np.ndarray, begin: int) -> np.ndarray:
    """Adds up a row's gradients in their own type.

    Args:
        values: [occurrences, ...], in order.
        begin: The sorted position of the first.
    """
    stretches: list[list[np.ndarray]] = []
    for start, stretch in _cut(begin, begin + len(values), STRETCH):
        pieces = [values[at - begin : end - begin] for at, end in _cut(start, stretch, PIECE)]
        stretches.append([_in_order(list(piece)) for piece in pieces])
    return _in_order([_in_order(sums) for sums in stretches])


def sums_of_rows(values: np.ndarray, indices: np.ndarray, first: int = 0) -> dict[int, np.ndarray]:
    """Returns the sum of each row, in order of first appearance.

    Args:
        values: [num_rows, ...] in the type to add in.
        indices: [num_rows].
        first: The sorted position of the least index.
    """
    sums: dict[int, np.ndarray] = {}
    for index in dict.fromkeys(indices.tolist()):
        begin = first + int((indices < index).sum())
        sums[index] = sum_by_cuts(values[indices == index], begin)
    return sums


def _cut(start: int, stop: int, size: int) -> Sequence[tuple[int, int]]:
    edges = [start, *range((start // size + 1) * size, stop, size), stop]
    return list(pairwise(edges))


def _in_order(parts: Sequence[np.ndarray]) -> np.ndarray:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
