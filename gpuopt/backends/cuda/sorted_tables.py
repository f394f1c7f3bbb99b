"""Rows of several sparse gradients of one width, sorted together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.count_of_steps import CountOfSteps
from gpuopt.backends.cuda.launch_sequence import LaunchSequence
from gpuopt.backends.cuda.launch_shapes import (
    PACK_BYTES,
    PIECE_THREADS,
    ROW_THREADS,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.sorted_rows import add_sort
from gpuopt.backends.cuda.structs import IndexList, SortedRows, TableGradient
from gpuopt.backends.cuda.workspace import Constants, Workspace
from gpuopt.backends.row_order import PIECE, STRETCH, num_keys


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
            self.sort.add(launch, ("refused", "lists", "num_lists"))
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
    """Adds the sums of runs' parts; returns the array that they are written to.

    Args:
        sequence: Takes `refused`, `only_gradient` and `gradients` anew at each start.
        launcher: The device's launcher.
        workspace: Provides the array that is returned.
        rows: The sorted rows.
        dtype: The gradients'.
        width: How many elements a row has.
        gradients: The kernel's arguments `only_gradient`, `gradients` and `num_tables`.
        refused: A row flag. If it is set, nothing is done.
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
        sequence.add(launch, ("refused", "only_gradient", "gradients"))
    return parts
