"""The launches of sparse updates: tables of one width are sorted and updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import (
    PACK_BYTES,
    ROW_THREADS,
    lanes_per_block,
    lanes_per_row,
)
from gpuopt.backends.cuda.launcher import Launch, Launcher, LaunchSequence
from gpuopt.backends.cuda.mixed import element_bytes, storage_of
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.scalar_arguments import ScalarArguments
from gpuopt.backends.cuda.sorted_rows import (
    SortedTables,
    Table,
    TablesKind,
    add_pieces,
    no_rows,
    tables_kind_of,
)
from gpuopt.backends.cuda.structs import Arrays, SortedRows
from gpuopt.backends.cuda.workspace import Constants, Workspace
from gpuopt.backends.record import StepRecord
from gpuopt.backends.row_order import ROWS_PER_WORD
from gpuopt.codecs import Codecs
from gpuopt.computed_once import computed_once
from gpuopt.rules.scaled import scaled
from gpuopt.rules.update_rule import UpdateRule

# The arguments with the addresses of gradients.
_GRADIENTS = ("only_gradient", "gradients")


class SparseKind(NamedTuple):
    """Tables for which the same prepared launches can be used.

    Attributes:
        tables: The part that matters to the sort.
        codecs: How variables and slots are stored.
        rule: The rule.
        other_rows: The rule of rows without a gradient; None if they stay, or catch up later.
        missed: The rule of the steps that rows may have missed; None if they are up to date.
        has_groups: Whether the tables are of several groups, or the rule has a form for groups
            alone; or rows of several tables may have missed steps.
    """

    tables: TablesKind
    codecs: Codecs
    rule: UpdateRule
    other_rows: UpdateRule | None
    missed: UpdateRule | None
    has_groups: bool


def kind_of(
    rule: UpdateRule,
    codecs: Codecs,
    width: int,
    tables: Sequence[Table],
    other_rows: UpdateRule | None,
    checks: bool,
) -> SparseKind:
    """Returns the kind of these tables, which are updated together."""
    count = tables[0].count_of_steps
    missed = None if count is None else count.rule
    has_groups = (
        len({table.group for table in tables}) > 1
        or kernels.has_factors(rule)
        or (missed is not None and len(tables) > 1)
        or codecs.per_block > 0
    )
    of_tables = tables_kind_of(tables[0].values.dtype, width, tables, checks)
    return SparseKind(of_tables, codecs, rule, other_rows, missed, has_groups)


class SparseLaunches:
    """The launches for tables of one kind, on one stream."""

    def __init__(
        self,
        launcher: Launcher,
        workspace: Workspace,
        kind: SparseKind,
        tables: Sequence[Table],
        scalars: Sequence[Scalars],
        record: StepRecord,
        refused: Any,
    ) -> None:
        """Prepares the launches; the last four arguments are those of the first `start`."""
        self._launcher = launcher
        self._kind = kind
        self._storage = storage_of(kind.codecs, kind.tables.dtype)
        self._tables = SortedTables(launcher, workspace, kind.tables)
        self._arrays, self._late_tables = Constants(launcher), Constants(launcher)
        touched: Any = None
        if kind.other_rows is not None:
            num_words = self._tables.num_keys // ROWS_PER_WORD
            touched = workspace.zeros("touched", num_words, "uint32")
        self._update = LaunchSequence()
        self._others: list[Launch] = []
        if kind.other_rows is not None:
            is_scaled = kind.rule.is_scaled
            self._rule_of_others = scaled(kind.other_rows) if is_scaled else kind.other_rows
            self._scalars_of_others = ScalarArguments(
                launcher, self._rule_of_others, self._storage, is_scaled
            )
            every = self._given_to_others(tables, scalars, record)
            for table, first_key, given in zip(tables, self._tables.first_keys, every, strict=True):
                bits = touched[first_key // ROWS_PER_WORD :]
                self._others.append(self._bind_others(table, bits, given, refused))
        self._scalars = ScalarArguments(launcher, kind.rule, self._storage, kind.has_groups)
        if kind.tables.num_rows:
            rows = self._tables.add_sort(workspace, tables, refused)
            if touched is not None:
                self._tables.sort.add(self._bind_marks(rows, touched, refused))
        elif kind.missed is not None:  # a step of no row is counted
            rows = no_rows(workspace)
        else:
            return
        self._add_update(workspace, rows, tables, touched, (scalars, record), refused)

    def start(
        self,
        tables: Sequence[Table],
        scalars: Sequence[Scalars],
        record: StepRecord,
        refused: Any,
        variable: int = 0,
    ) -> None:
        """Updates tables of the kind's heights, in its order, on the current stream.

        If the flag `refused` is set, nothing is written. It gets the number `variable` if rows are
        out of range.
        """
        self._tables.start(tables, refused, variable)
        if self._kind.other_rows is not None:
            every = self._given_to_others(tables, scalars, record)
            for table, launch, given in zip(tables, self._others, every, strict=True):
                launch.replace(arrays=Arrays(table.addresses), refused=refused, **given)
                launch.start()
        of_tables = self._scalars.of(_of_tables(tables, scalars, record), record)
        self._update.start(**of_tables, refused=refused, **self._arguments_of(tables))

    def _arguments_of(self, tables: Sequence[Table]) -> dict[str, Any]:
        """Returns the arguments with the addresses of gradients, variables, slots and counts."""
        steps = self._row_bytes
        arrays: list[Arrays] = []
        for table, first_key in zip(tables, self._tables.first_keys, strict=True):
            arrays.append(
                Arrays(
                    [
                        address - first_key * step
                        for address, step in zip(table.addresses, steps, strict=True)
                    ]
                )
            )
        given = {**self._tables.gradients_of(tables), "only_arrays": arrays[0]}
        if not self._tables.is_single:
            given["arrays"] = self._arrays.set([each.of for each in arrays])
        if self._kind.missed is not None:
            late = [
                table.count_of_steps.table_from(first_key)
                for table, first_key in zip(tables, self._tables.first_keys, strict=True)
                if table.count_of_steps is not None
            ]
            given["only_late"] = late[0]
            if self._kind.has_groups:
                given["late_tables"] = self._late_tables.set(late)
        return given

    @computed_once
    def _row_bytes(self) -> list[int]:
        """How many bytes a row has, in the variable, each slot, their scales, and the companion."""
        rule, codecs, width = self._kind.rule, self._kind.codecs, self._kind.tables.width
        widths = [1 if name in rule.row_slots else width for name in rule.slots]
        slots = [
            codec.dtypes[0].itemsize * each
            for codec, each in zip(codecs.slots, widths, strict=True)
        ]
        scales = [codec.dtypes[1].itemsize * self._blocks_per_row for codec in codecs.coded]
        var, *companion = [dtype.itemsize * width for dtype in codecs.var.dtypes]
        return [var, *slots, *scales, *companion]

    @computed_once
    def _blocks_per_row(self) -> int:
        """How many blocks of codes a row has, if there are codes."""
        per_block = self._kind.codecs.per_block
        return -(-self._kind.tables.width // per_block) if per_block else 1

    @computed_once
    def _lanes(self) -> int:
        """How many threads share a row, or a block of codes."""
        width, per_block = self._kind.tables.width, self._kind.codecs.per_block
        if per_block:
            return lanes_per_block(width, per_block)
        return lanes_per_row(width, PACK_BYTES // element_bytes(self._storage))

    def _add_update(
        self,
        workspace: Workspace,
        rows: SortedRows,
        tables: Sequence[Table],
        touched: Any,
        scalars: tuple[Sequence[Scalars], StepRecord],
        refused: Any,
    ) -> None:
        kind = self._kind.tables
        every, record = scalars
        of_tables = self._scalars.of(_of_tables(tables, every, record), record)
        given = self._arguments_of(tables)
        where = {name: value for name, value in given.items() if name in _GRADIENTS}
        where["num_tables"] = len(tables)
        parts = add_pieces(
            self._update, self._launcher, workspace, rows, kind.dtype, kind.width, where, refused
        )
        arguments = {
            **given,
            "num_tables": len(tables),
            "rows": rows,
            "parts": parts,
            "row_width": kind.width,
            **of_tables,
            "refused": refused,
        }
        self._update.add(self._bind_update(workspace, touched, arguments))

    def _bind_update(
        self, workspace: Workspace, touched: Any, arguments: Mapping[str, Any]
    ) -> Launch:
        kind, rows, codes = self._kind, arguments["rows"], self._kind.codecs.coded
        form = self._storage, name_of(rows.keys.dtype), kind.has_groups, codes
        blocks_per_row = 1  # of late rows: the same lanes take all blocks of one
        more: dict[str, Any]
        if kind.missed is None:
            kernel, more = kernels.sparse_update(kind.rule, *form), {"touched": touched}
            blocks_per_row = self._blocks_per_row
        else:
            kernel = kernels.late_update(kind.rule, kind.missed, *form)
            more = {"num_done": workspace.zeros("num_done", 1, "uint32")}
        if not codes:
            more["lanes_per_row"] = self._lanes
        blocks = self._tables.blocks(rows.num_rows * blocks_per_row, self._lanes)
        return self._launcher.bind(kernel, blocks, ROW_THREADS, **arguments, **more)

    def _bind_marks(self, rows: SortedRows, touched: Any, refused: Any) -> Launch:
        return self._launcher.bind(
            kernels.mark_rows(name_of(rows.keys.dtype)),
            self._tables.blocks(rows.num_rows, 1),
            ROW_THREADS,
            rows=rows,
            touched=touched,
            refused=refused,
        )

    def _given_to_others(
        self, tables: Sequence[Table], scalars: Sequence[Scalars], record: StepRecord
    ) -> list[dict[str, Any]]:
        """Returns the arguments for the scalars of each table's rows without a gradient."""
        if not self._rule_of_others.is_scaled:
            each = (self._scalars_of_others.of([scalars[table.group]]) for table in tables)
            return [{**of_table, "table": 0} for of_table in each]
        of_tables = self._scalars_of_others.of(_of_tables(tables, scalars, record), record)
        return [{**of_tables, "table": number} for number in range(len(tables))]

    def _bind_others(
        self, table: Table, touched: Any, scalars: dict[str, Any], refused: Any
    ) -> Launch:
        kind, rule, codes = self._kind.tables, self._rule_of_others, self._kind.codecs.coded
        size = table.height * kind.width
        blocks = self._tables.blocks(size // (PACK_BYTES // element_bytes(self._storage)), 1)
        if codes:
            blocks = self._tables.blocks(table.height * self._blocks_per_row, self._lanes)
        return self._launcher.bind(
            kernels.update_other_rows(rule, self._storage, rule.is_scaled, codes),
            blocks,
            ROW_THREADS,
            arrays=Arrays(table.addresses),
            size=size,
            row_width=kind.width,
            **scalars,
            touched=touched,
            refused=refused,
        )


def _of_tables(
    tables: Sequence[Table], scalars: Sequence[Scalars], record: StepRecord
) -> list[Scalars]:
    """Returns each table's scalars, for each count that groups have some for."""
    num_groups = len(scalars) // record.num_counts
    return [
        scalars[first + table.group]
        for first in range(0, len(scalars), num_groups)
        for table in tables
    ]
