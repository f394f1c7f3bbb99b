"""Sorts the rows that a sparse gradient names: on the device, without waiting for it."""

from __future__ import annotations

from typing import Any

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import DIGIT_BITS, NUM_DIGITS, PIECE, SORT_THREADS, shares
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import SortedRows
from gpuopt.backends.cuda.workspace import Workspace

# Positions are numbers of 32 bits, and so is the end of a piece that begins before them.
MAX_ROWS = 2**31


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
        launcher: The device's launcher.
        workspace: Provides the arrays that are returned; the next sort overwrites them.
        rows: int32 or int64 [num_rows], at least one, within [0, height).
        height: The variable's number of rows: decides how many digits are sorted by.
        refused: A row flag. If it is set, nothing is done.
        touched: uint32, a bit for each row of the variable; those of `rows` are set.

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
    divided = shares(size)
    counts = workspace.take("counts", NUM_DIGITS * divided.num_shares, "uint32")
    source = rows
    for shift in range(0, max(1, (height - 1).bit_length()), DIGIT_BITS):
        launcher.launch(
            kernels.count_digits(name_of(source.dtype)),
            divided.num_shares,
            SORT_THREADS,
            keys=source,
            shares=divided,
            shift=shift,
            counts=counts,
            refused=refused,
        )
        launcher.launch(
            kernels.move_rows(name_of(source.dtype), key_type),
            divided.num_shares,
            SORT_THREADS,
            keys=source,
            positions=positions[0],
            shares=divided,
            shift=shift,
            counts=counts,
            sorted_keys=keys[1],
            sorted_positions=positions[1],
            refused=refused,
        )
        keys.reverse()
        positions.reverse()
        source = keys[0]
    found = SortedRows(
        keys=keys[0],
        positions=positions[0],
        begins=workspace.take("begins", size + 1, "uint32"),
        num_runs=workspace.take("number of runs", 1, "uint32"),
        run_of_piece=workspace.take("run of piece", -(-size // PIECE), "uint32"),
        num_rows=size,
    )
    launcher.launch(
        kernels.count_runs(key_type),
        divided.num_shares,
        SORT_THREADS,
        keys=found.keys,
        shares=divided,
        counts=counts,
        refused=refused,
    )
    launcher.launch(
        kernels.write_runs(key_type),
        divided.num_shares,
        SORT_THREADS,
        keys=found.keys,
        shares=divided,
        counts=counts,
        begins=found.begins,
        num_runs=found.num_runs,
        run_of_piece=found.run_of_piece,
        touched=touched,
        refused=refused,
    )
    return found
