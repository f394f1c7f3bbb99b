"""Which rows a sparse gradient names, sorted: all on the device, and no one waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import (
    FIND_THREADS,
    FIND_TILE,
    PIECE,
    SORT_THREADS,
    SORT_TILE,
    SUM_THREADS,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.workspace import Workspace

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS


@dataclass(frozen=True)
class SortedRows:
    """Occurrences of rows, by row and then by position, and the runs of equal ones.

    Attributes:
        keys: The rows, [num_rows].
        positions: Where each stood in the gradient, [num_rows].
        begins: Where each run begins, and after the last one `num_rows`.
        num_runs: How many different rows there are, [1].
        run_of_piece: Which run each PIECE of sorted positions starts in.
    """

    keys: Any
    positions: Any
    begins: Any
    num_runs: Any
    run_of_piece: Any

    @property
    def num_rows(self) -> int:
        return int(self.keys.size)


def sort_rows(
    launcher: Launcher,
    workspace: Workspace,
    rows: Any,
    height: int,
    refused: Any,
    touched: Any = None,
) -> SortedRows:
    """Enqueues the sort, and the search for runs.

    Args:
        launcher: Of the device.
        workspace: Holds what is returned, until it is taken for another sort.
        rows: int32 or int64 [num_rows], at least one, within [0, height).
        height: Of the variable: decides how many digits are sorted by.
        refused: Where it is set, nothing is done.
        touched: uint32 bits, one for each row of the variable; those of `rows` are set.
    """
    size = rows.size
    key_type = "uint32" if height <= 2**32 else "uint64"
    keys, positions = (
        [workspace.take(f"{name} {side}", size, dtype) for side in ("a", "b")]
        for name, dtype in (("keys", key_type), ("positions", "uint32"))
    )
    blocks = num_blocks(size, SORT_THREADS, launcher.num_multiprocessors)
    launcher.launch(
        kernels.number_rows(rows.dtype.name, key_type),
        blocks,
        SORT_THREADS,
        [rows, np.int64(size), keys[0], positions[0], refused],
    )
    num_tiles = -(-size // SORT_TILE)
    counts = workspace.take("counts", _NUM_DIGITS * num_tiles, "uint32")
    total = workspace.take("total", 1, "uint32")
    blocks = num_blocks(num_tiles, 1, launcher.num_multiprocessors)
    for shift in range(0, max(1, (height - 1).bit_length()), _DIGIT_BITS):
        launcher.launch(
            kernels.count_digits(key_type),
            blocks,
            SORT_THREADS,
            [keys[0], np.int64(size), np.int32(shift), counts, np.int64(num_tiles), refused],
        )
        _sum(launcher, counts, total, refused)
        pairs = [keys[1], positions[1]]
        launcher.launch(
            kernels.move_rows(key_type),
            blocks,
            SORT_THREADS,
            [
                *(keys[0], positions[0], np.int64(size), np.int32(shift)),
                *(counts, np.int64(num_tiles), *pairs, refused),
            ],
        )
        keys.reverse()
        positions.reverse()
    return _find_runs(launcher, workspace, keys[0], positions[0], refused, touched)


def _find_runs(
    launcher: Launcher,
    workspace: Workspace,
    keys: Any,
    positions: Any,
    refused: Any,
    touched: Any,
) -> SortedRows:
    size = keys.size
    num_tiles = -(-size // FIND_TILE)
    blocks = num_blocks(num_tiles, 1, launcher.num_multiprocessors)
    counts = workspace.take("runs of tiles", num_tiles, "uint32")
    num_runs = workspace.take("number of runs", 1, "uint32")
    begins = workspace.take("begins", size + 1, "uint32")
    run_of_piece = workspace.take("run of piece", -(-size // PIECE), "uint32")
    tiles = np.int64(num_tiles)
    launcher.launch(
        kernels.count_runs(keys.dtype.name),
        blocks,
        FIND_THREADS,
        [keys, np.int64(size), counts, tiles, refused],
    )
    _sum(launcher, counts, num_runs, refused)
    marks = np.int32(touched is not None)
    unused = counts  # the kernel takes a pointer in any case
    launcher.launch(
        kernels.write_runs(keys.dtype.name),
        blocks,
        FIND_THREADS,
        [
            *(keys, np.int64(size), counts, tiles, begins, run_of_piece),
            *(unused if touched is None else touched, marks, refused),
        ],
    )
    return SortedRows(keys, positions, begins, num_runs, run_of_piece)


def _sum(launcher: Launcher, counts: Any, total: Any, refused: Any) -> None:
    launcher.launch(
        kernels.sum_counts(), 1, SUM_THREADS, [counts, np.int64(counts.size), total, refused]
    )
