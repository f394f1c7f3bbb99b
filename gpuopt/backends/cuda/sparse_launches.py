"""The launches of sparse updates: tables of one width are sorted and updated together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_sequence import LaunchSequence
from gpuopt.backends.cuda.launch_shapes import (
    PACK_BYTES,
    PIECE,
    PIECE_THREADS,
    ROW_THREADS,
    ROWS_PER_WORD,
    STRETCH,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launch, Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.scalar_arguments import ScalarArguments
from gpuopt.backends.cuda.sorted_rows import MAX_ROWS, MAX_SHORT_KEYS, add_sort
from gpuopt.backends.cuda.structs import Arrays, IndexList, SortedRows, TableGradient
from gpuopt.backends.cuda.workspace import Constants, Workspace
from gpuopt.rules.update_rule import UpdateRule


class Table(NamedTuple):
    """One variable with rows to update.

    Attributes:
        addresses: Of the variable and its slots.
        height: The variable's number of rows.
        values: [num_rows, ...], contiguous: the gradient's rows.
        rows: int32 or int64 [num_rows], contiguous.
        group: The position of its scalars among those of all groups.
    """

    addresses: Sequence[int]
    height: int
    values: Any
    rows: Any
    group: int = 0


class SparseKind(NamedTuple):
    """What launches are prepared for.

    Attributes:
        rule: What is computed.
        dtype: The variables'.
        width: How many elements a row has.
        heights: The tables' numbers of rows.
        other_rows: The rule of rows without a gradient; None if they stay.
        num_rows: How many rows the gradients have in all.
        row_type: numpy's name of the dtype of a single table's rows; "" for several tables.
        checks: Whether the rows of the single table are checked.
        has_groups: Whether the tables are of several groups.
    """

    rule: UpdateRule
    dtype: np.dtype[Any]
    width: int
    heights: tuple[int, ...]
    other_rows: UpdateRule | None
    num_rows: int
    row_type: str
    checks: bool
    has_groups: bool


def kind_of(
    rule: UpdateRule,
    dtype: np.dtype[Any],
    width: int,
    tables: Sequence[Table],
    other_rows: UpdateRule | None,
    checks: bool,
) -> SparseKind:
    """Returns the kind of these tables, which are updated together."""
    heights = tuple(table.height for table in tables)
    num_rows = sum(table.rows.size for table in tables)
    row_type = name_of(tables[0].rows.dtype) if len(tables) == 1 else ""
    groups = {table.group for table in tables}
    return SparseKind(
        rule, dtype, width, heights, other_rows, num_rows, row_type, checks, len(groups) > 1
    )


def together(tables: Iterable[Table]) -> Iterator[list[Table]]:
    """Divides tables of one width into lists whose rows are sorted together.

    All keys of a list of several tables have 32 bits, and positions less than `MAX_ROWS`.
    """
    some: list[Table] = []
    keys = rows = 0
    for table in tables:
        keys += _num_keys(table.height)
        rows += len(table.rows)
        if some and (keys > MAX_SHORT_KEYS or rows >= MAX_ROWS):
            yield some
            some, keys, rows = [], _num_keys(table.height), len(table.rows)
        some.append(table)
    if some:
        yield some


def _num_keys(height: int) -> int:
    """Whole words of bits, so that each table has its own part of `touched`."""
    return -(-height // ROWS_PER_WORD) * ROWS_PER_WORD


class SparseLaunches:
    """The launches for tables of one kind, on one stream."""

    def __init__(
        self,
        launcher: Launcher,
        workspace: Workspace,
        kind: SparseKind,
        tables: Sequence[Table],
        scalars: Sequence[Scalars],
        refused: Any,
    ) -> None:
        """Prepares the launches; the last three arguments are those of the first `start`."""
        self._launcher = launcher
        self._kind = kind
        self._is_single = len(kind.heights) == 1
        *self._first_keys, num_keys = [0, *accumulate(map(_num_keys, kind.heights))]
        self._lists, self._gradients, self._arrays = (Constants(launcher) for _ in range(3))
        self._gathered: Any = None
        if not self._is_single:
            self._gathered = workspace.take("gathered", kind.num_rows, "int32")
        touched: Any = None
        if kind.other_rows is not None:
            touched = workspace.zeros("touched", num_keys // ROWS_PER_WORD, "uint32")
        self._sort, self._update = LaunchSequence(), LaunchSequence()
        self._others: list[Launch] = []
        if kind.other_rows is not None:
            for table, first_key in zip(tables, self._first_keys, strict=True):
                bits = touched[first_key // ROWS_PER_WORD :]
                given = kernels.scalars_of(kind.other_rows, scalars[table.group])
                self._others.append(self._bind_others(kind.other_rows, table, bits, given, refused))
        self._scalars = ScalarArguments(launcher, kind.rule, kind.dtype, kind.has_groups)
        if kind.num_rows:
            rows = self._add_sort(workspace, tables, num_keys, refused)
            if touched is not None:
                self._sort.add(self._bind_marks(rows, touched, refused), ("refused",))
            self._add_update(workspace, rows, tables, touched, scalars, refused)

    def start(
        self, tables: Sequence[Table], scalars: Sequence[Scalars], refused: Any, variable: int = 0
    ) -> None:
        """Updates the tables on the current stream.

        Args:
            tables: Of the kind's heights, in its order.
            scalars: The scalars of both rules, by name: those of each group.
            refused: A row flag. If it is set, nothing is written.
            variable: What the flag is to say if the launches find that rows are out of range.
        """
        rows = tables[0].rows if self._is_single else self._gathered
        self._sort.start(rows, refused=refused, variable=variable, **self._lists_of(tables))
        if self._kind.other_rows is not None:
            for table, launch in zip(tables, self._others, strict=True):
                given = kernels.scalars_of(self._kind.other_rows, scalars[table.group])
                launch.replace(arrays=Arrays(table.addresses), scalars=given, refused=refused)
                launch.start()
        of_tables = self._scalars.of([scalars[table.group] for table in tables])
        self._update.start(**of_tables, refused=refused, **self._tables_of(tables))

    def _lists_of(self, tables: Sequence[Table]) -> dict[str, Any]:
        """Returns the arguments that say where several tables' rows are."""
        if self._is_single:
            return {}
        lists: list[IndexList] = []
        first = 0
        for table, first_key in zip(tables, self._first_keys, strict=True):
            rows = table.rows
            if rows.size:
                address = self._launcher.address(rows)
                lists.append(IndexList(address, rows.itemsize, first, first_key, table.height, 0))
                first += rows.size
        return {"lists": self._lists.set(lists), "num_lists": len(lists)}

    def _tables_of(self, tables: Sequence[Table]) -> dict[str, Any]:
        """Returns the arguments that say where gradients, variables and slots are."""
        item_bytes = self._kind.dtype.itemsize
        row_bytes = self._kind.width * item_bytes
        num_row_slots = len(self._kind.rule.row_slots)
        gradients: list[TableGradient] = []
        arrays: list[Arrays] = []
        first = 0
        for table, first_key in zip(tables, self._first_keys, strict=True):
            values = self._launcher.address(table.values)
            gradients.append(TableGradient(first_key, values - first * row_bytes))
            steps = [row_bytes] * len(table.addresses)
            steps[len(steps) - num_row_slots :] = [item_bytes] * num_row_slots
            arrays.append(
                Arrays(
                    [
                        address - first_key * step
                        for address, step in zip(table.addresses, steps, strict=True)
                    ]
                )
            )
            first += table.rows.size
        given: dict[str, Any] = {"only_gradient": gradients[0], "only_arrays": arrays[0]}
        if not self._is_single:
            given["gradients"] = self._gradients.set(gradients)
            given["arrays"] = self._arrays.set([each.of for each in arrays])
        return given

    def _add_sort(
        self,
        workspace: Workspace,
        tables: Sequence[Table],
        num_keys: int,
        refused: Any,
    ) -> SortedRows:
        rows = tables[0].rows if self._is_single else self._gathered
        if not self._is_single:
            launch = self._launcher.bind(
                kernels.gather_rows(),
                self._blocks(self._kind.num_rows, 1),
                ROW_THREADS,
                **self._lists_of(tables),
                num_rows=self._kind.num_rows,
                keys=rows,
                refused=refused,
            )
            self._sort.add(launch, ("refused", "lists", "num_lists"))
        # A single table's keys are its rows: they may be as many as 32 bits can number.
        height = tables[0].height if self._is_single else num_keys
        checks = self._kind.checks
        return add_sort(self._sort, self._launcher, workspace, rows, height, refused, checks)

    def _add_update(
        self,
        workspace: Workspace,
        rows: SortedRows,
        tables: Sequence[Table],
        touched: Any,
        scalars: Sequence[Scalars],
        refused: Any,
    ) -> None:
        kind = self._kind
        of_tables = self._scalars.of([scalars[table.group] for table in tables])
        given = {"gradients": None, "arrays": None, **self._tables_of(tables)}
        where = {name: given[name] for name in ("only_gradient", "gradients")}
        where["num_tables"] = len(tables)
        parts = add_pieces(
            self._update, self._launcher, workspace, rows, kind.dtype, kind.width, where, refused
        )
        lanes = lanes_per_row(kind.width, PACK_BYTES // kind.dtype.itemsize)
        launch = self._launcher.bind(
            kernels.sparse_update(
                kind.rule, name_of(kind.dtype), name_of(rows.keys.dtype), kind.has_groups
            ),
            self._blocks(rows.num_rows, lanes),
            ROW_THREADS,
            **given,
            num_tables=len(tables),
            rows=rows,
            parts=parts,
            row_width=kind.width,
            **of_tables,
            touched=touched,
            lanes_per_row=lanes,
            refused=refused,
        )
        self._update.add(launch, ("refused", *of_tables, *given))

    def _bind_marks(self, rows: SortedRows, touched: Any, refused: Any) -> Launch:
        return self._launcher.bind(
            kernels.mark_rows(name_of(rows.keys.dtype)),
            self._blocks(rows.num_rows, 1),
            ROW_THREADS,
            rows=rows,
            touched=touched,
            refused=refused,
        )

    def _bind_others(
        self,
        rule: UpdateRule,
        table: Table,
        touched: Any,
        scalars: tuple[Any, ...],
        refused: Any,
    ) -> Launch:
        kind = self._kind
        size = table.height * kind.width
        packs = size // (PACK_BYTES // kind.dtype.itemsize)
        return self._launcher.bind(
            kernels.update_other_rows(rule, name_of(kind.dtype)),
            self._blocks(packs, 1),
            ROW_THREADS,
            arrays=Arrays(table.addresses),
            size=size,
            row_width=kind.width,
            scalars=scalars,
            touched=touched,
            refused=refused,
        )

    def _blocks(self, num_items: int, lanes: int) -> int:
        return num_blocks(num_items * lanes, ROW_THREADS, self._launcher.num_multiprocessors)


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
