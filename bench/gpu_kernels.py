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

_FLOAT = 4  # bytes: all benchmarks are in float32
_PACK = 16
_DIGITS = 256
_PIECE, _STRETCH = 32, 64 * 32
_INDEX_BYTES = {"long long": 8, "int": 4, "unsigned long long": 8, "unsigned int": 4}
# Within a block: the sum of what earlier threads have; see `sum_before` in kernels/shared/grid.cuh.
_SUM_BEFORE = SHARED.times(8)  # five shuffles, a load from shared memory, two barriers


def _index_bytes(launch: Launch) -> int:
    """The size of what a kernel reads as its keys: its first template argument."""
    found = re.search(r"<([\w ]+)", launch.kernel)
    assert found
    return _INDEX_BYTES[found[1]]


# ---- Dense


def _dense(begin: Waits, before_data: Waits) -> WorkOf:
    def work(launch: Launch, data: Dense) -> Work:
        chunks = launch.arguments["num_chunks"]
        packs = data.elements / chunks * _FLOAT / _PACK
        passes = math.ceil(packs / launch.block)
        num_bytes = data.elements * _FLOAT * (3 + 2 * data.slots)
        item = before_data.and_then(DRAM.times(passes))
        filling = before_data.and_then(DRAM)
        return Work(num_bytes, 0, chunks, 1, begin, item, filling, item)

    return work


# ---- Rows: the check, the sort, and the search for runs


def _check_rows(launch: Launch, data: Rows) -> Work:
    return Work(8 * data.num_rows, 0, data.num_rows, launch.block, Waits(), DRAM, DRAM, DRAM)


def _of_tiles(
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


def _bytes_of_keys(launch: Launch, data: Rows, shares: int) -> float:
    return _index_bytes(launch) * data.num_rows


def _bytes_of_moves(launch: Launch, data: Rows, shares: int, counts_read: int) -> float:
    key = _index_bytes(launch)
    pair = key if key == 8 else key + 4  # the first digit's positions are not read
    return (pair + 8) * data.num_rows + 4 * _DIGITS * shares * counts_read


def _bytes_of_runs(launch: Launch, data: Rows, shares: int) -> float:
    return 4 * data.num_rows + 4 * data.different + 4 * data.num_rows / _PIECE


# ---- Rows: the sums, and the update

# The positions of some gradients, and then the gradients.
_GRADIENTS = one_by_one(L2, DRAM)
# The run that a piece or stretch starts in, and where that begins.
_FIND_RUN = L2.times(2)


def _sum_pieces(launch: Launch, data: Rows) -> Work:
    pieces = math.ceil(data.num_rows / _PIECE)
    long = data.occurrences(2 * _PIECE)
    row_bytes = data.width * _FLOAT
    cached_bytes = 4 * long + data.parts(_PIECE) * row_bytes + 12 * pieces
    sums = _GRADIENTS.times(_PIECE / 8 * _columns(launch, data))  # 8 rows are in flight
    longest = _FIND_RUN.and_then(sums)
    return Work(
        long * row_bytes,
        cached_bytes,
        pieces,
        launch.block // launch.arguments["lanes_per_row"],
        L2,
        _FIND_RUN.and_then(sums.times(long / data.num_rows)),
        _FIND_RUN.and_then(_GRADIENTS),
        longest,
    )


def _sum_stretches(launch: Launch, data: Rows) -> Work:
    stretches = math.ceil(data.num_rows / _STRETCH)
    very_long = data.occurrences(2 * _STRETCH)
    cached_bytes = (very_long / _PIECE + data.parts(_STRETCH)) * data.width * _FLOAT
    sums = L2.times(_STRETCH / _PIECE / 8 * _columns(launch, data))  # 8 parts are in flight
    return Work(
        0,
        cached_bytes,
        stretches,
        launch.block // launch.arguments["lanes_per_row"],
        L2,
        _FIND_RUN.and_then(sums.times(very_long / data.num_rows)),
        _FIND_RUN.and_then(L2),
        _FIND_RUN.and_then(sums if very_long else Waits()),
    )


def _columns(launch: Launch, data: Rows) -> int:
    """How many packs of a row each of its threads takes, one after another."""
    return math.ceil(data.width * _FLOAT / _PACK / launch.arguments["lanes_per_row"])


def _sparse_update(begin: Waits, of_long_run: Callable[[int], Waits]) -> WorkOf:
    """`of_long_run(length)`: the waits for the parts of a run of more than 64 occurrences."""

    def work(launch: Launch, data: Rows) -> Work:
        row_bytes = data.width * _FLOAT
        short = data.num_rows - data.occurrences(2 * _PIECE)
        state = 2 * (1 + data.slots) * row_bytes
        num_bytes = short * row_bytes + data.different * state
        cached_bytes = 4 * short + 8 * data.different + data.parts(_PIECE) * row_bytes
        find = L2.times(2)  # where the run begins and ends, and its key
        columns = _columns(launch, data)

        def of_run(length: int) -> Waits:
            if length > 2 * _PIECE:
                sums = DRAM.and_then(of_long_run(length))  # the state comes first
            else:
                sums = _GRADIENTS.times(math.ceil(length / 4))  # 4 rows are in flight
            return find.and_then(sums.times(columns))

        all_runs = one_by_one(*(of_run(n).times(count) for n, count in data.runs.items()))
        return Work(
            num_bytes,
            cached_bytes,
            data.different,
            launch.block // launch.arguments["lanes_per_row"],
            begin,
            all_runs.times(1 / data.different),
            find.and_then(_GRADIENTS),
            max((of_run(length) for length in data.runs), key=lambda waits: waits.us),
        )

    return work


# ---- The tables


def _of_groups(shares: int) -> int:
    return math.ceil(shares / 16)


# By kernel: why it waits.
KERNELS: Mapping[str, WorkOf] = {
    # The flag of refused rows, and the chunk beside it. Then its variable's column of the table,
    # the next chunk beside it; then the data, pass by pass. Eight columns share a line of DRAM, so
    # that all but the first are in L2.
    "dense_update": _dense(begin=L2, before_data=L2),
    "check_rows": _check_rows,
    # Clear the counts; per tile, keys that are in flight together, and four additions.
    "count_digits": _of_tiles(
        lambda shares: SHARED.times(4), one_by_one(L2, SHARED.times(4)), 1024, _bytes_of_keys
    ),
    # Counts of groups, eight at a time, after those of shares, which are in flight with the keys.
    # Per tile: counts by warp and places (8), and four rounds: match, read, store, advance.
    "move_rows": _of_tiles(
        lambda shares: L2.times(math.ceil(_of_groups(shares) / 8)).and_then(_SUM_BEFORE),
        one_by_one(L2, SHARED.times(8 + 4 * 4)),
        1024,
        lambda launch, data, shares: _bytes_of_moves(launch, data, shares, 16 + _of_groups(shares)),
    ),
    # Per tile: keys that are in flight together, and four votes.
    "count_runs": _of_tiles(
        lambda shares: _SUM_BEFORE, one_by_one(L2, SHARED.times(4)), 1024, _bytes_of_keys
    ),
    # The counts of earlier shares, 256 at a time; per tile keys, votes, a sum, and four rounds.
    "write_runs": _of_tiles(
        lambda shares: L2.times(math.ceil(shares / 256)).and_then(_SUM_BEFORE),
        one_by_one(L2, SHARED.times(4), _SUM_BEFORE, SHARED.times(4)),
        1024,
        _bytes_of_runs,
    ),
    # The flag; then for each piece the run that it starts in, its begin, and 32 gradients.
    "sum_pieces": _sum_pieces,
    "sum_stretches": _sum_stretches,
    # The flag, and the number of runs. A run of up to 64 is summed from four gradients at a time,
    # a longer one from eight parts of 32, or of 2,048 if it is longer than 4,096.
    "sparse_update": _sparse_update(
        begin=L2.times(2),
        of_long_run=lambda length: L2.times(
            math.ceil(length / (_STRETCH if length > 2 * _STRETCH else _PIECE) / 8)
        ),
    ),
}

# As the kernels were at 29a79d3, with which the model is compared; see the review's findings 14 to
# 16. Loads stood under conditions, one after another; nothing was in flight beside the flag.
KERNELS_OF_29A79D3: Mapping[str, WorkOf] = {
    **KERNELS,
    "dense_update": _dense(begin=L2, before_data=L2.times(2)),
    "count_digits": _of_tiles(
        lambda shares: L2.and_then(SHARED.times(4)),
        one_by_one(L2, SHARED).times(8),
        2048,
        _bytes_of_keys,
    ),
    # All counts of a digit, 16 at a time, and a remainder one by one.
    "move_rows": _of_tiles(
        lambda shares: L2.times(1 + shares // 16 + shares % 16).and_then(_SUM_BEFORE),
        one_by_one(L2, SHARED.times(8 + 8 * 4)),
        2048,
        lambda launch, data, shares: _bytes_of_moves(launch, data, shares, shares),
    ),
    "count_runs": _of_tiles(
        lambda shares: L2.and_then(_SUM_BEFORE),
        one_by_one(L2, SHARED).times(8),
        2048,
        _bytes_of_keys,
    ),
    "write_runs": _of_tiles(
        lambda shares: L2.times(1 + math.ceil(shares / 256)).and_then(_SUM_BEFORE),
        one_by_one(one_by_one(L2, SHARED).times(8), _SUM_BEFORE, SHARED.times(8)),
        2048,
        _bytes_of_runs,
    ),
    # One level of parts: of eight, two to four loads were in flight, so that they took 0.6 us.
    "sparse_update": _sparse_update(
        begin=L2.times(2), of_long_run=lambda length: L2.times(3 * length / _PIECE / 8)
    ),
}
