"""The work of each kernel's launches: `KERNELS`.

Which loads wait for which follows from the sources in `kernels/`, and from the machine code that
NVRTC makes of them, where the two differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.gpu_launches import Launch
from bench.gpu_work import DRAM, L2, SHARED, Dense, Rows, Waits, Work, one_by_one

WorkOf = Callable[[Launch, Any], Work]

FLOAT = 4  # bytes: all benchmarks are in float32
_PACK = 16
_DIGITS = 256
_PIECE, _STRETCH = 32, 16 * 32
_INDEX_BYTES = {"long long": 8, "int": 4, "unsigned long long": 8, "unsigned int": 4}
# Within a block: the sum of what earlier threads have; see `sum_before` in kernels/shared/grid.cuh.
SUM_BEFORE = SHARED.times(8)  # five shuffles, a load from shared memory, two barriers


def _index_bytes(launch: Launch) -> int:
    """The size of what a kernel reads as its keys: its first template argument."""
    found = re.search(r"<([\w ]+)", launch.kernel)
    assert found
    return _INDEX_BYTES[found[1]]


# ---- Dense


def dense(begin: Waits, before_data: Waits) -> WorkOf:
    def work(launch: Launch, data: Dense) -> Work:
        chunks = launch.arguments["num_chunks"]
        packs = data.elements / chunks * FLOAT / _PACK
        passes = math.ceil(packs / launch.block)
        num_bytes = data.elements * FLOAT * (3 + 2 * data.slots)
        item = before_data.and_then(DRAM.times(passes))
        filling = before_data.and_then(DRAM)
        return Work(num_bytes, 0, chunks, 1, begin, item, filling, item)

    return work


# ---- Rows: the check and the sort


def _check_rows(launch: Launch, data: Rows) -> Work:
    return Work(8 * data.num_rows, 0, data.num_rows, launch.block, Waits(), DRAM, DRAM, DRAM)


def of_tiles(
    begin: Callable[[int], Waits],
    tile: Waits,
    tile_rows: int,
    cached_bytes: Callable[[Launch, Rows, int], float],
) -> WorkOf:
    """The work of kernels that go through shares of rows, tile by tile; `begin(num_shares)`."""

    def work(launch: Launch, data: Rows) -> Work:
        shares = launch.grid
        tiles = math.ceil(data.num_rows / shares / tile_rows) * shares
        cached = cached_bytes(launch, data, shares)
        return Work(0, cached, tiles, 1, begin(shares), tile, tile, tile)

    return work


def bytes_of_keys(launch: Launch, data: Rows, shares: int) -> float:
    return _index_bytes(launch) * data.num_rows


def bytes_of_moves(launch: Launch, data: Rows, shares: int, counts_read: int) -> float:
    key = _index_bytes(launch)
    pair = key if key == 8 else key + 4  # the first digit's positions are not read
    return (pair + 8) * data.num_rows + 4 * _DIGITS * shares * counts_read


# ---- Rows: the sums, and the update


def _check_and_count_digits(launch: Launch, data: Rows) -> Work:
    begin, tile = SHARED.times(4), one_by_one(DRAM, SHARED.times(4))
    work = of_tiles(lambda shares: begin, tile, 1024, bytes_of_keys)(launch, data)
    return work._replace(num_bytes=work.cached_bytes, cached_bytes=0)


# Keys and positions of some gradients, and then the gradients.
GRADIENTS = one_by_one(L2, DRAM)


# Of a run that may begin anywhere in its piece, the part that it has there, on average.
def _in_first_piece(length: int) -> float:
    return sum(min(length, rest) for rest in range(1, _PIECE + 1)) / _PIECE


def _occurrences_in_first_pieces(data: Rows) -> float:
    return sum(_in_first_piece(length) * count for length, count in data.runs.items())


def _parts(data: Rows) -> float:
    """In how many pieces a run goes on from the one before, on average."""
    return (data.num_rows - data.different) / _PIECE


def _sum_pieces(launch: Launch, data: Rows) -> Work:
    row_bytes = data.width * FLOAT
    pieces = math.ceil(data.num_rows / _PIECE)
    later = data.num_rows - _occurrences_in_first_pieces(data)
    stretches = _parts(data) * _PIECE / _STRETCH
    # Keys and positions; the parts of pieces, written and read; those of stretches; keys again.
    cached_bytes = 8 * later + (2 * _parts(data) + stretches) * row_bytes + 12 * pieces
    columns = columns_of(launch, data)
    sums = GRADIENTS.times(_PIECE / 8 * columns)  # 8 rows are in flight
    stretch = SHARED.and_then(L2.times(_STRETCH / _PIECE / 8 * columns))  # 8 parts are in flight
    return Work(
        later * row_bytes,
        cached_bytes,
        pieces,
        launch.block // launch.arguments["lanes_per_row"],
        Waits(),
        one_by_one(L2, sums.times(later / data.num_rows), stretch),
        one_by_one(L2, GRADIENTS, stretch),  # nothing hides the stretch, after the last data
        one_by_one(L2, sums, stretch),
    )


def columns_of(launch: Launch, data: Rows) -> int:
    """How many packs of a row each of its threads takes, one after another."""
    return math.ceil(data.width * FLOAT / _PACK / launch.arguments["lanes_per_row"])


def _sparse_update(launch: Launch, data: Rows) -> Work:
    row_bytes = data.width * FLOAT
    first = _occurrences_in_first_pieces(data)
    state = 2 * (1 + data.slots) * row_bytes
    num_bytes = first * row_bytes + data.different * state
    # Two keys of each position, key and position of each gradient, and parts.
    cached_bytes = 8 * data.num_rows + 8 * first + _parts(data) * row_bytes
    columns = columns_of(launch, data)

    def of_run(length: int) -> Waits:
        """Of one that has a whole piece first, and then as many parts as it can."""
        sums = GRADIENTS.times(math.ceil(min(length, _PIECE) / 4))  # 4 rows are in flight
        parts = math.ceil(min(max(0, length - _PIECE), _STRETCH - _PIECE) / _PIECE)
        stretches = math.ceil(max(0, length - _STRETCH) / _STRETCH)
        waits = math.ceil(parts / 8) + math.ceil(stretches / 8)  # 8 parts are in flight
        return sums.and_then(L2.times(waits)).times(columns)

    all_runs = one_by_one(*(of_run(n).times(count) for n, count in data.runs.items()))
    return Work(
        num_bytes,
        cached_bytes,
        data.num_rows,
        launch.block // launch.arguments["lanes_per_row"],
        Waits(),
        L2.and_then(all_runs.times(1 / data.num_rows)),
        L2.and_then(GRADIENTS),
        L2.and_then(max((of_run(length) for length in data.runs), key=lambda waits: waits.us)),
    )


# ---- The tables


def _of_groups(shares: int) -> int:
    return math.ceil(shares / 16)


# By kernel: why it waits.
KERNELS: Mapping[str, WorkOf] = {
    # The flag of refused rows, and the chunk beside it. Then its variable's entry in the table,
    # the next chunk beside it; then the data, pass by pass. Some entries share a line of DRAM, so
    # that all but the first are in L2.
    "dense_update": dense(begin=L2, before_data=L2),
    "check_rows": _check_rows,
    # Clear the counts; per tile, keys that are in flight together, and four additions.
    "count_digits": of_tiles(
        lambda shares: SHARED.times(4), one_by_one(L2, SHARED.times(4)), 1024, bytes_of_keys
    ),
    # Does so for rows that nothing has read before.
    "check_and_count_digits": _check_and_count_digits,
    # Counts of groups, eight at a time, after those of shares, which are in flight with the keys.
    # Per tile: counts by warp and places (8), four matches together, and four rounds: read, store,
    # advance.
    "move_rows": of_tiles(
        lambda shares: L2.times(math.ceil(_of_groups(shares) / 8)).and_then(SUM_BEFORE),
        one_by_one(L2, SHARED.times(8 + 1 + 4 * 3)),
        1024,
        lambda launch, data, shares: bytes_of_moves(launch, data, shares, 16 + _of_groups(shares)),
    ),
    # The flag, and keys that say whether a run goes on in the piece; 32 gradients; a barrier; and
    # the parts of the stretch.
    "sum_pieces": _sum_pieces,
    # The flag, and two keys of each position that say whether a run begins there. It is summed from
    # four gradients at a time, with their keys and positions; then from eight parts of pieces, and
    # then of stretches.
    "sparse_update": _sparse_update,
}
