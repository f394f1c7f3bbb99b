"""The launches that add the squares of sparse gradients to a norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_sequence import LaunchSequence
from gpuopt.backends.cuda.launch_shapes import (
    CLIP_THREADS,
    MEASURED_ROWS,
    PACK_BYTES,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.sorted_tables import SortedTables, Table, TablesKind, add_pieces
from gpuopt.backends.cuda.structs import ClipRule, ClipTotals, LossDecision
from gpuopt.backends.cuda.workspace import Workspace

_NOWHERE = ClipTotals(0, 0, 0, 0, 0, 0, 0)
# The sums become no results: another launch follows.
NO_RULE = ClipRule(0, 0.0, 1.0, 1.0, 0, 0)


class MeasuredTables:
    """The launches for tables of one kind, on one stream: they sort, and add up squares."""

    def __init__(
        self,
        launcher: Launcher,
        workspace: Workspace,
        kind: TablesKind,
        tables: Sequence[Table],
        refused: Any,
        decision: LossDecision | None = None,
    ) -> None:
        """Prepares the launches; the last three arguments are those of the first `start`."""
        self._tables = SortedTables(launcher, workspace, kind)
        self._measure = LaunchSequence()
        num_parts = -(-kind.num_rows // MEASURED_ROWS)
        parts = workspace.take("squares", num_parts, "float64")
        rows = self._tables.add_sort(workspace, tables, refused)
        given = {**self._tables.gradients_of(tables), "num_tables": len(tables)}
        run_parts = add_pieces(
            self._measure, launcher, workspace, rows, kind.dtype, kind.width, given, refused
        )
        launch = launcher.bind(
            kernels.measure_rows(
                name_of(kind.dtype), name_of(rows.keys.dtype), decides=decision is not None
            ),
            num_blocks(num_parts, 1, launcher.num_multiprocessors),
            CLIP_THREADS,
            **given,
            rows=rows,
            run_parts=run_parts,
            row_width=kind.width,
            lanes_per_row=lanes_per_row(kind.width, PACK_BYTES // kind.dtype.itemsize),
            refused=refused,
            parts=parts,
            totals=_NOWHERE,
            rule=NO_RULE,
            results=None,
            **self._deciding(decision),
        )
        takes = ("refused", "totals", "rule", "results", "only_gradient", "gradients")
        self._measure.add(launch, (*takes, *self._deciding(decision)))

    def start(
        self,
        tables: Sequence[Table],
        refused: Any,
        decision: LossDecision | None = None,
        *,
        totals: ClipTotals,
        rule: ClipRule,
        results: Any,
    ) -> None:
        """Adds up the squares on the current stream.

        Args:
            tables: Of the kind's heights, in its order.
            refused: A row flag. If it is set, nothing is added.
            decision: The decision about the step, if they were prepared with one.
            totals: Where sums go.
            rule: How results are made of them.
            results: Where these go; None if another launch follows.
        """
        self._tables.start(tables, refused)
        self._measure.start(
            refused=refused,
            totals=totals,
            rule=rule,
            results=results,
            **self._deciding(decision),
            **self._tables.gradients_of(tables),
        )

    def _deciding(self, decision: LossDecision | None) -> dict[str, LossDecision]:
        return {} if decision is None else {"decision": decision}
