"""Sorts the rows that sparse gradients name, on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.catch_up import CountOfSteps
from gpuopt.backends.cuda.launch_shapes import (
    DIGIT_BITS,
    FEW_ROWS,
    NUM_DIGITS,
    PACK_BYTES,
    PIECE_THREADS,
    ROW_THREADS,
    SHARES_PER_GROUP,
    SORT_THREADS,
    lanes_per_row,
    num_blocks,
    shares,
)
from gpuopt.backends.cuda.launcher import Launcher, LaunchSequence
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import IndexList, SortedRows, TableGradient
from gpuopt.backends.cuda.workspace import Constants, Workspace
from gpuopt.backends.row_order import MAX_ROWS, MAX_SHORT_KEYS, PIECE, STRETCH, num_keys


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
        sequence.add(launch, rows="source")
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
        else:
            kernel = kernels.count_digits(name_of(source.dtype))
            given["shift"] = shift
        launch = launcher.bind(kernel, divided.num_shares, SORT_THREADS, **given)
        reads = "keys" if source is rows else None
        sequence.add(launch, rows=reads)
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
        sequence.add(launch, rows=reads)
        source = keys[side]
    return found


class Table(NamedTuple):
    """One variable with rows to update.

    Attributes:
        addresses: Of the variable and its slots.
        height: The variable's number of rows.
        values: [num_rows, ...], contiguous: the gradient's rows.
        rows: int32 or int64 [num_rows], contiguous.
        group: The position of its scalars among those of all groups.
        count_of_steps: The count of its steps, if its rows may have missed some.
        first_number: See `Target`.
    """

    addresses: Sequence[int]
    height: int
    values: Any
    rows: Any
    group: int = 0
    count_of_steps: CountOfSteps | None = None
    first_number: int = 0


class TablesKind(NamedTuple):
    """Tables for which the same prepared sort can be used.

    Attributes:
        dtype: The gradients'.
        width: How many elements a row has.
        heights: The tables' numbers of rows.
        num_rows: How many rows the gradients have in all.
        row_type: numpy's name of the dtype of a single table's rows; "" for several tables.
        checks: Whether the rows of the single table are checked.
    """

    dtype: np.dtype[Any]
    width: int
    heights: tuple[int, ...]
    num_rows: int
    row_type: str
    checks: bool


def tables_kind_of(
    dtype: np.dtype[Any], width: int, tables: Sequence[Table], checks: bool
) -> TablesKind:
    """Returns the kind of these tables, which are sorted together."""
    heights = tuple(table.height for table in tables)
    num_rows = sum(table.rows.size for table in tables)
    row_type = name_of(tables[0].rows.dtype) if len(tables) == 1 else ""
    return TablesKind(dtype, width, heights, num_rows, row_type, checks)


class SortedTables:
    """The launches that sort the rows of tables of one kind, on one stream.

    Attributes:
        first_keys: The key of each table's row 0.
        num_keys: How many keys there are.
        sort: The launches.
    """

    def __init__(self, launcher: Launcher, workspace: Workspace, kind: TablesKind) -> None:
        self._launcher = launcher
        self._kind = kind
        self.is_single = len(kind.heights) == 1
        *self.first_keys, self.num_keys = [0, *accumulate(map(num_keys, kind.heights))]
        self._lists, self._gradients = Constants(launcher), Constants(launcher)
        self._gathered: Any = None
        if not self.is_single:
            self._gathered = workspace.take("gathered", kind.num_rows, "int32")
        self.sort = LaunchSequence()

    def start(self, tables: Sequence[Table], refused: Any, variable: int = 0) -> None:
        """Sorts the tables' rows on the current stream; see `SparseLaunches.start`."""
        rows = tables[0].rows if self.is_single else self._gathered
        self.sort.start(rows, refused=refused, variable=variable, **self._lists_of(tables))

    def gradients_of(self, tables: Sequence[Table]) -> dict[str, Any]:
        """Returns the arguments with the addresses of gradients."""
        row_bytes = self._kind.width * self._kind.dtype.itemsize
        gradients: list[TableGradient] = []
        first = 0
        for table, first_key in zip(tables, self.first_keys, strict=True):
            values = self._launcher.address(table.values)
            begin = values - first * row_bytes
            gradients.append(TableGradient(first_key, begin, table.first_number))
            first += table.rows.size
        given: dict[str, Any] = {"only_gradient": gradients[0]}
        if not self.is_single:
            given["gradients"] = self._gradients.set(gradients)
        return given

    def add_sort(self, workspace: Workspace, tables: Sequence[Table], refused: Any) -> SortedRows:
        """Adds the launches that sort; returns where the sorted rows will be."""
        rows = tables[0].rows if self.is_single else self._gathered
        if not self.is_single:
            launch = self._launcher.bind(
                kernels.gather_rows(),
                self.blocks(self._kind.num_rows, 1),
                ROW_THREADS,
                **self._lists_of(tables),
                num_rows=self._kind.num_rows,
                keys=rows,
                refused=refused,
            )
            self.sort.add(launch)
        # A single table's keys are its rows: they may be as many as 32 bits can number.
        height = tables[0].height if self.is_single else self.num_keys
        checks = self._kind.checks
        return add_sort(self.sort, self._launcher, workspace, rows, height, refused, checks)

    def blocks(self, num_items: int, lanes: int) -> int:
        """Returns how many blocks of ROW_THREADS share some items."""
        return num_blocks(num_items * lanes, ROW_THREADS, self._launcher.num_multiprocessors)

    def _lists_of(self, tables: Sequence[Table]) -> dict[str, Any]:
        """Returns the arguments with the addresses of several tables' rows."""
        if self.is_single:
            return {}
        lists: list[IndexList] = []
        first = 0
        for table, first_key in zip(tables, self.first_keys, strict=True):
            rows = table.rows
            if rows.size:
                address = self._launcher.address(rows)
                lists.append(IndexList(address, rows.itemsize, first, first_key, table.height, 0))
                first += rows.size
        return {"lists": self._lists.set(lists), "num_lists": len(lists)}


def add_pieces(
    sequence: LaunchSequence,
    launcher: Launcher,
    workspace: Workspace,
    rows: SortedRows,
    dtype: np.dtype[Any],
    width: int,
    gradients: Mapping[str, Any],
    refused: Any,
) -> Any:
    """Adds the sums of runs' parts; returns the array that they are written to, from `workspace`.

    The sequence takes `refused`, `only_gradient` and `gradients` anew at each start.
    """
    num_pieces, num_stretches = -(-rows.num_rows // PIECE), -(-rows.num_rows // STRETCH)
    real = np.dtype(compute_type(dtype))
    parts = workspace.take("parts", (num_pieces + num_stretches) * width, name_of(real))
    if num_pieces > 1:  # no run goes on in the first one
        lanes = lanes_per_row(width, PACK_BYTES // dtype.itemsize)
        launch = launcher.bind(
            kernels.sum_pieces(name_of(dtype), name_of(rows.keys.dtype)),
            num_blocks(num_pieces * lanes, PIECE_THREADS, launcher.num_multiprocessors),
            PIECE_THREADS,
            **gradients,
            rows=rows,
            row_width=width,
            parts=parts,
            lanes_per_row=lanes,
            refused=refused,
        )
        sequence.add(launch)
    return parts
