"""The work of the kernels of 29a79d3, with which the model is compared.

See the review's findings 14 to 16. Loads stood under conditions, one after another; nothing was in
flight beside the flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from bench.gpu_kernels import (
    FLOAT,
    GRADIENTS,
    KERNELS,
    SUM_BEFORE,
    WorkOf,
    bytes_of_keys,
    bytes_of_moves,
    columns_of,
    dense,
    of_tiles,
)
from bench.gpu_launches import Launch
from bench.gpu_work import DRAM, L2, SHARED, Rows, Waits, Work, one_by_one

_PIECE = 32


def _bytes_of_runs(launch: Launch, data: Rows, shares: int) -> float:
    return 4 * data.num_rows + 4 * data.different + 4 * data.num_rows / _PIECE


# The run that a piece or stretch starts in, and where that begins.
_FIND_RUN = L2.times(2)


def _sum_pieces(launch: Launch, data: Rows) -> Work:
    pieces = math.ceil(data.num_rows / _PIECE)
    long = data.occurrences(2 * _PIECE)
    row_bytes = data.width * FLOAT
    cached_bytes = 4 * long + data.parts(_PIECE) * row_bytes + 12 * pieces
    sums = GRADIENTS.times(_PIECE / 8 * columns_of(launch, data))  # 8 rows are in flight
    longest = _FIND_RUN.and_then(sums)
    return Work(
        long * row_bytes,
        cached_bytes,
        pieces,
        launch.block // launch.arguments["lanes_per_row"],
        L2,
        _FIND_RUN.and_then(sums.times(long / data.num_rows)),
        _FIND_RUN.and_then(GRADIENTS),
        longest,
    )


def _sparse_update(begin: Waits, of_long_run: Callable[[int], Waits]) -> WorkOf:
    """`of_long_run(length)`: the waits for the parts of a run of more than 64 occurrences."""

    def work(launch: Launch, data: Rows) -> Work:
        row_bytes = data.width * FLOAT
        short = data.num_rows - data.occurrences(2 * _PIECE)
        state = 2 * (1 + data.slots) * row_bytes
        num_bytes = short * row_bytes + data.different * state
        cached_bytes = 4 * short + 8 * data.different + data.parts(_PIECE) * row_bytes
        find = L2.times(2)  # where the run begins and ends, and its key
        columns = columns_of(launch, data)

        def of_run(length: int) -> Waits:
            if length > 2 * _PIECE:
                sums = DRAM.and_then(of_long_run(length))  # the state comes first
            else:
                sums = GRADIENTS.times(math.ceil(length / 4))  # 4 rows are in flight
            return find.and_then(sums.times(columns))

        all_runs = one_by_one(*(of_run(n).times(count) for n, count in data.runs.items()))
        return Work(
            num_bytes,
            cached_bytes,
            data.different,
            launch.block // launch.arguments["lanes_per_row"],
            begin,
            all_runs.times(1 / data.different),
            find.and_then(GRADIENTS),
            max((of_run(length) for length in data.runs), key=lambda waits: waits.us),
        )

    return work


KERNELS_OF_29A79D3: Mapping[str, WorkOf] = {
    "check_rows": KERNELS["check_rows"],
    "dense_update": dense(begin=L2, before_data=L2.times(2)),
    "count_digits": of_tiles(
        lambda shares: L2.and_then(SHARED.times(4)),
        one_by_one(L2, SHARED).times(8),
        2048,
        bytes_of_keys,
    ),
    # All counts of a digit, 16 at a time, and a remainder one by one.
    "move_rows": of_tiles(
        lambda shares: L2.times(1 + shares // 16 + shares % 16).and_then(SUM_BEFORE),
        one_by_one(L2, SHARED.times(8 + 8 * 4)),
        2048,
        lambda launch, data, shares: bytes_of_moves(launch, data, shares, shares),
    ),
    "count_runs": of_tiles(
        lambda shares: L2.and_then(SUM_BEFORE),
        one_by_one(L2, SHARED).times(8),
        2048,
        bytes_of_keys,
    ),
    "write_runs": of_tiles(
        lambda shares: L2.times(1 + math.ceil(shares / 256)).and_then(SUM_BEFORE),
        one_by_one(one_by_one(L2, SHARED).times(8), SUM_BEFORE, SHARED.times(8)),
        2048,
        _bytes_of_runs,
    ),
    "sum_pieces": _sum_pieces,
    # One level of parts: of eight, two to four loads were in flight, so that they took 0.6 us.
    "sparse_update": _sparse_update(
        begin=L2.times(2), of_long_run=lambda length: L2.times(3 * length / _PIECE / 8)
    ),
}
