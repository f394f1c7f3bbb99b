"""Which rows a sparse gradient names, sorted: all on the device, and no one waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import (
    PIECE,
    SORT_THREADS,
    shares,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.workspace import Workspace

_DIGIT_BITS = 8
_NUM_DIGITS = 1 << _DIGIT_BITS
# Positions are numbers of 32 bits, and so is the end of a piece that begins before them.
MAX_ROWS = 2**31


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

    Raises:
        ValueError: there are MAX_ROWS rows or more.
    """
    size = rows.size
    if size >= MAX_ROWS:
        raise ValueError(f"a sparse gradient may have less than {MAX_ROWS} rows; this has {size}")
    key_type = "uint32" if height <= 2**32 else "uint64"
    keys, positions = (
        [workspace.take(f"{name} {side}", size, dtype) for side in ("a", "b")]
        for name, dtype in (("keys", key_type), ("positions", "uint32"))
    )
    num_shares, rows_per_share = shares(size)
    counts = workspace.take("counts", _NUM_DIGITS * num_shares, "uint32")
    of_shares = counts, np.int64(num_shares), np.int64(rows_per_share)
    source = rows
    for shift in range(0, max(1, (height - 1).bit_length()), _DIGIT_BITS):
        digit = np.int64(size), np.int32(shift), *of_shares
        launcher.launch(
            kernels.count_digits(source.dtype.name),
            num_shares,
            SORT_THREADS,
            [source, *digit, refused],
        )
        launcher.launch(
            kernels.move_rows(source.dtype.name, key_type),
            num_shares,
            SORT_THREADS,
            [source, positions[0], *digit, keys[1], positions[1], refused],
        )
        keys.reverse()
        positions.reverse()
        source = keys[0]
    begins = workspace.take("begins", size + 1, "uint32")
    num_runs = workspace.take("number of runs", 1, "uint32")
    run_of_piece = workspace.take("run of piece", -(-size // PIECE), "uint32")
    launcher.launch(
        kernels.count_runs(key_type),
        num_shares,
        SORT_THREADS,
        [keys[0], np.int64(size), *of_shares, refused],
    )
    marks = np.int32(touched is not None)
    unused = counts  # the kernel takes a pointer in any case
    launcher.launch(
        kernels.write_runs(key_type),
        num_shares,
        SORT_THREADS,
        [
            *(keys[0], np.int64(size), *of_shares, begins, num_runs, run_of_piece),
            *(unused if touched is None else touched, marks, refused),
        ],
    )
    return SortedRows(keys[0], positions[0], begins, num_runs, run_of_piece)
