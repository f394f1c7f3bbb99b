"""The launches of sparse updates of tables whose slots are in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import ROW_THREADS, lanes_per_block
from gpuopt.backends.cuda.launcher import Launch
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.sorted_tables import Table
from gpuopt.backends.cuda.sparse_launches import SparseLaunches
from gpuopt.backends.cuda.structs import Arrays
from gpuopt.backends.cuda.workspace import Workspace
from gpuopt.computed_once import computed_once


class CodedLaunches(SparseLaunches):
    """The launches for tables of one kind, on one stream; their blocks end at rows."""

    @computed_once
    def _row_bytes(self) -> list[int]:
        width, num_slots = self._kind.tables.width, len(self._kind.rule.slots)
        of_scales = self._blocks_per_row() * np.dtype(np.float32).itemsize
        codes, scales = [width] * num_slots, [of_scales] * num_slots
        var, *beside = [width * dtype.itemsize for dtype in self._kind.codecs.var.dtypes]
        return [var, *codes, *scales, *beside]

    def _blocks_per_row(self) -> int:
        return -(-self._kind.tables.width // self._kind.codecs.per_block)

    def _thread_blocks(self, num_rows: int) -> int:
        lanes = lanes_per_block(self._kind.tables.width, self._kind.codecs.per_block)
        return self._tables.blocks(num_rows * self._blocks_per_row(), lanes)

    def _bind_update(
        self, workspace: Workspace, touched: Any, arguments: Mapping[str, Any]
    ) -> Launch:
        rows, kind = arguments["rows"], self._kind
        form = kind.codecs.coded, self._storage, name_of(rows.keys.dtype)
        more: dict[str, Any]
        if kind.missed is None:
            kernel, more = kernels.update_coded_rows(kind.rule, *form), {"touched": touched}
            blocks = self._thread_blocks(rows.num_rows)
        else:
            kernel = kernels.update_late_coded_rows(kind.rule, kind.missed, *form)
            more = {"num_done": workspace.zeros("num_done", 1, "uint32")}
            # The same lanes take all blocks of a row.
            lanes = lanes_per_block(kind.tables.width, kind.codecs.per_block)
            blocks = self._tables.blocks(rows.num_rows, lanes)
        return self._launcher.bind(kernel, blocks, ROW_THREADS, **arguments, **more)

    def _bind_others(
        self, table: Table, touched: Any, scalars: dict[str, Any], refused: Any
    ) -> Launch:
        rule = self._rule_of_others
        return self._launcher.bind(
            kernels.update_other_coded_rows(
                rule, self._kind.codecs.coded, self._storage, rule.is_scaled
            ),
            self._thread_blocks(table.height),
            ROW_THREADS,
            arrays=Arrays(table.addresses),
            size=table.height * self._kind.tables.width,
            row_width=self._kind.tables.width,
            **scalars,
            touched=touched,
            refused=refused,
        )
