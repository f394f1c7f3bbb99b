"""The order in which gradients of one row are added up, the same on every device.

All rows of a call, of tables of one width, are sorted by their table and index; equal ones keep
their order. Sorted positions are cut into pieces of `PIECE`, and pieces into stretches of
`PIECES_PER_STRETCH`. A row's gradients are added one by one within a piece, then the sums of the
pieces of a stretch, and then the sums of the stretches: in float32, or float64 for float64. So n of
them are as far from their exact sum as (32 + 16 + n / 512) eps times the sum of their magnitudes,
at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

PIECE = 32
PIECES_PER_STRETCH = 16
STRETCH = PIECES_PER_STRETCH * PIECE

# Positions are numbers of 32 bits, and so is the end of a piece that begins before them.
MAX_ROWS = 2**31
# Keys of so many values have 32 bits.
MAX_SHORT_KEYS = 2**32
# Bits of an array that has one for each row of a table.
ROWS_PER_WORD = 32


class TableOfWidth(NamedTuple):
    """A table, and how many elements each of its rows has."""

    width: int
    height: int
    rows: Any


def together(tables: Iterable[Any]) -> Iterator[list[Any]]:
    """Divides tables of one width, with `height` and `rows`, into lists that are sorted together.

    All keys of a list of several tables have 32 bits, and positions less than `MAX_ROWS`.
    """
    some: list[Any] = []
    keys = rows = 0
    for table in tables:
        keys += num_keys(table.height)
        rows += len(table.rows)
        if some and (keys > MAX_SHORT_KEYS or rows >= MAX_ROWS):
            yield some
            some, keys, rows = [], num_keys(table.height), len(table.rows)
        some.append(table)
    if some:
        yield some


def num_keys(height: int) -> int:
    """Returns how many keys a table has: whole words of bits, so that each has its own words."""
    return -(-height // ROWS_PER_WORD) * ROWS_PER_WORD


def first_positions(tables: Sequence[TableOfWidth]) -> list[int]:
    """Returns, for each table of a call, the sorted position of its first row."""
    firsts: dict[int, int] = {}
    by_width: dict[int, list[TableOfWidth]] = {}
    for table in tables:
        by_width.setdefault(table.width, []).append(table)
    for of_width in by_width.values():
        for some in together(of_width):
            counts = accumulate([len(table.rows) for table in some], initial=0)
            firsts.update(zip(map(id, some), counts, strict=False))
    return [firsts[id(table)] for table in tables]
