"""Sorts the rows that sparse gradients name: on the device, without waiting for it."""

from __future__ import annotations

from typing import Any

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_sequence import LaunchSequence
from gpuopt.backends.cuda.launch_shapes import (
    DIGIT_BITS,
    FEW_ROWS,
    NUM_DIGITS,
    SHARES_PER_GROUP,
    SORT_THREADS,
    shares,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import SortedRows
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.backends.row_order import MAX_ROWS, MAX_SHORT_KEYS

_REFUSED: tuple[str, ...] = ("refused",)


def no_rows(workspace: Workspace) -> SortedRows:
    """Returns what a sort of no row would."""
    keys, positions = (workspace.take(f"{name} a", 0, "uint32") for name in ("keys", "positions"))
    return SortedRows(keys=keys, positions=positions, num_rows=0)


def add_sort(
    sequence: LaunchSequence,
    launcher: Launcher,
    workspace: Workspace,
    rows: Any,
    height: int,
    refused: Any,
    checks: bool = False,
) -> SortedRows:
    """Adds the launches of the sort.

    Args:
        sequence: Takes `rows` and `refused` anew at each start, and with `checks`, `variable`.
        launcher: The device's launcher.
        workspace: Provides the arrays that are returned; the next sort overwrites them. After an
            error it must not be used again: counts in it may not be 0 as the next sort needs.
        rows: int32 or int64 [num_rows], at least one, within [0, height) unless they are checked.
        height: How many keys there are: decides how many digits are sorted by.
        refused: A row flag. If it is set, nothing is done.
        checks: Whether the flag is set, naming `variable`, if a row is not within [0, height). Only
            for more rows than FEW_ROWS.

    Returns:
        What the launches write.

    Raises:
        ValueError: there are MAX_ROWS rows or more.
    """
    size = rows.size
    if size >= MAX_ROWS:
        raise ValueError(f"a sparse gradient may have less than {MAX_ROWS} rows; this has {size}")
    key_type = "uint32" if height <= MAX_SHORT_KEYS else "uint64"
    keys, positions = (
        [workspace.take(f"{name} {side}", size, dtype) for side in ("a", "b")]
        for name, dtype in (("keys", key_type), ("positions", "uint32"))
    )
    found = SortedRows(keys=keys[0], positions=positions[0], num_rows=size)
    key_bits = max(1, (height - 1).bit_length())
    if size <= FEW_ROWS:
        launch = launcher.bind(
            kernels.sort_few_rows(name_of(rows.dtype), key_type),
            1,
            SORT_THREADS,
            source=rows,
            num_rows=size,
            key_bits=key_bits,
            sorted_keys=found.keys,
            sorted_positions=found.positions,
            refused=refused,
        )
        sequence.add(launch, _REFUSED, rows="source")
        return found
    divided = shares(size)
    counts = workspace.take("counts", NUM_DIGITS * divided.num_shares, "uint32")
    num_group_counts = NUM_DIGITS * -(-divided.num_shares // SHARES_PER_GROUP)
    # Each digit clears the counts of the next one, and the last digit those of the first one, for
    # the next sort: so there are two digits or more.
    shifts = range(0, max(key_bits, DIGIT_BITS + 1), DIGIT_BITS)
    group_counts = [workspace.zeros("group counts", num_group_counts, "uint32")]
    for digit in range(1, len(shifts)):
        name = f"group counts of digit {digit}"
        group_counts.append(workspace.take(name, num_group_counts, "uint32"))
    source = rows
    for digit, shift in enumerate(shifts):
        given = {
            "keys": source,
            "shares": divided,
            "counts": counts,
            "group_counts": group_counts[digit],
            "next_group_counts": group_counts[(digit + 1) % len(shifts)],
            "refused": refused,
        }
        if checks and source is rows:
            kernel = kernels.check_and_count_digits(name_of(rows.dtype))
            given |= {"height": height, "variable": 0}
            takes = (*_REFUSED, "variable")
        else:
            kernel = kernels.count_digits(name_of(source.dtype))
            given["shift"] = shift
            takes = _REFUSED
        launch = launcher.bind(kernel, divided.num_shares, SORT_THREADS, **given)
        reads = "keys" if source is rows else None
        sequence.add(launch, takes, rows=reads)
        # The last digit's pairs go to the returned arrays.
        side = (len(shifts) - 1 - digit) % 2
        launch = launcher.bind(
            kernels.move_rows(name_of(source.dtype), key_type),
            divided.num_shares,
            SORT_THREADS,
            keys=source,
            positions=positions[1 - side],
            shares=divided,
            shift=shift,
            counts=counts,
            group_counts=group_counts[digit],
            sorted_keys=keys[side],
            sorted_positions=positions[side],
            refused=refused,
        )
        sequence.add(launch, _REFUSED, rows=reads)
        source = keys[side]
    return found
