"""Rows that missed steps are brought up to date, in a GPU's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.backend import INDEX_DTYPES
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.count_of_steps import CountOfSteps
from gpuopt.backends.cuda.dense_plan import DensePlan
from gpuopt.backends.cuda.launch_shapes import (
    PACK_BYTES,
    ROW_THREADS,
    lanes_per_block,
    lanes_per_row,
    num_blocks,
)
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.mixed import element_bytes, storage_of
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.parameters import name_of
from gpuopt.backends.cuda.structs import Arrays
from gpuopt.backends.cuda.workspace import Workspaces
from gpuopt.locks import Lock
from gpuopt.rules.rounded import rounded


class CudaLateRows:
    """See `LateRows`. A row is moved by the first of the threads that find it behind."""

    def __init__(
        self, launcher: Launcher, lock: Lock, order: UpdateOrder, workspaces: Workspaces
    ) -> None:
        """Prepares nothing; see `CudaRowFlags` for the arguments."""
        self._launcher = launcher
        self._lock = lock
        self._order = order
        self._workspaces = workspaces

    def bring_up(self, plan: DensePlan, catch_up: CatchUp, rows: Any = None) -> None:
        count: CountOfSteps | None = catch_up.on_device
        if count is None or not plan.num_variables:
            return
        with self._lock, self._launcher.device():
            if self._launcher.is_capturing():
                raise RuntimeError(
                    "a table has rows that missed steps, which a capture into a CUDA graph would "
                    "make again with each launch: read it before, or call flush()"
                )
            given = None if rows is None else self._readable(rows)
            if given is not None and not given.size:
                return
            last = self._order.begin(plan.updated, plan.last_update, is_step=False)
            plan.last_update = last
            try:
                plan.fill_stand_ins()
                self._launch(plan, catch_up, given)
                plan.copy_stand_ins_back()
            finally:
                self._order.end(last, (plan.memory, count.arrays, given, rows))

    def _launch(self, plan: DensePlan, catch_up: CatchUp, rows: Any) -> None:
        num_rows = plan.height if rows is None else rows.size
        count: CountOfSteps = catch_up.on_device
        rule = count.rule if catch_up.rounding is None else rounded(count.rule)
        storage, codecs = storage_of(plan.codecs, plan.dtype), plan.codecs
        index = name_of(np.dtype(np.int64) if rows is None else rows.dtype)
        more = {}
        if codecs.per_block:
            lanes = lanes_per_block(plan.width, codecs.per_block)
            kernel = kernels.bring_up_coded_rows(rule, count.rule, codecs.coded, storage, index)
        else:
            lanes = lanes_per_row(plan.width, PACK_BYTES // element_bytes(storage))
            kernel = kernels.bring_up_rows(rule, count.rule, storage, index)
            more = {"lanes_per_row": lanes}
        blocks = num_blocks(num_rows * lanes, ROW_THREADS, self._launcher.num_multiprocessors)
        given = {
            "arrays": Arrays(plan.addresses),
            "rows": rows,
            "num_rows": num_rows,
            "height": plan.height,
            "row_width": plan.width,
            "late": count.table,
            **more,
        }
        workspace = self._workspaces.take(self._launcher.stream())
        launch = workspace.launch(kernel, blocks, ROW_THREADS, **given)
        if rows is not None:
            launch.forget("rows")
        self._workspaces.put_back(workspace)

    def _readable(self, rows: Any) -> Any:
        """Returns rows as a kernel reads them."""
        rows = rows if rows.dtype in INDEX_DTYPES else rows.astype(np.int64)
        return self._launcher.xp.ascontiguousarray(rows).reshape(-1)
