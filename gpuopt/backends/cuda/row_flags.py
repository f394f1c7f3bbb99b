"""Flags in device memory: each is set if a gradient names a row that its variable lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import RowCheck
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import FEW_ROWS, ROW_THREADS, num_blocks
from gpuopt.backends.cuda.launcher import Download, Launcher
from gpuopt.backends.cuda.order import UpdateOrder
from gpuopt.backends.cuda.structs import IndexList
from gpuopt.backends.cuda.workspace import Workspaces
from gpuopt.locks import Lock


class CudaRowFlag:
    """See `RowFlag`.

    Attributes:
        array: In device memory; to be read by kernels after `CudaRowFlags.settle`.
        unchecked: A check that no kernel has been launched for yet: the sort of the same rows can
            do it as well.
    """

    __slots__ = ("array", "last_update", "unchecked")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.last_update: Any = None
        self.unchecked: RowCheck | None = None


class CudaRowFlags:
    """See `RowFlags`. Kernels read a flag before they write anything."""

    def __init__(
        self,
        launcher: Launcher,
        lock: Lock,
        order: UpdateOrder,
        workspaces: Workspaces,
    ) -> None:
        self._launcher = launcher
        self._lock = lock
        self._order = order
        self._workspaces = workspaces

    def new(self) -> CudaRowFlag:
        with self._lock, self._launcher.device():
            flag = CudaRowFlag(self._launcher.xp.zeros(2, dtype=np.uint64))
            self._order.end(self._order.begin((flag,)))
            return flag

    def check(self, flag: CudaRowFlag, checks: Sequence[RowCheck]) -> None:
        with self._lock, self._launcher.device():
            last = self._order.begin((flag,), flag.last_update)
            try:
                if flag.unchecked is not None:
                    self.settle(flag)
                if len(checks) == 1 and checks[0].rows.size > FEW_ROWS:
                    flag.unchecked = checks[0]
                else:
                    self._check(flag, checks)
            finally:
                self._order.end(last, (flag, checks))

    def settle(self, flag: CudaRowFlag) -> None:
        """Launches the check that waits for a sort of its rows, if there is one."""
        if flag.unchecked is not None:
            check, flag.unchecked = flag.unchecked, None
            self._check(flag, [check])
            self._order.hold((check,))

    def take(self, flag: CudaRowFlag, rows: Any) -> RowCheck | None:
        """Returns the check that waits for a sort of these rows, which the caller must do."""
        check = flag.unchecked
        if check is None or check.rows is not rows:
            return None
        flag.unchecked = None
        return check

    def _check(self, flag: CudaRowFlag, checks: Sequence[RowCheck]) -> None:
        contiguous = [self._launcher.xp.ascontiguousarray(rows) for _, rows, _ in checks]
        lists: list[IndexList] = []
        num_rows = 0
        for (number, _, height), rows in zip(checks, contiguous, strict=True):
            size = rows.size
            if size:
                address = self._launcher.address(rows)
                lists.append(IndexList(address, rows.itemsize, num_rows, 0, height, number))
                num_rows += size
        if not lists:
            return
        blocks = num_blocks(num_rows, ROW_THREADS, self._launcher.num_multiprocessors)
        workspace = self._workspaces.take(self._launcher.stream())
        workspace.launch(
            kernels.check_rows(),
            blocks,
            ROW_THREADS,
            only=lists[0],
            lists=workspace.checked_lists.set(lists) if len(lists) > 1 else None,
            num_lists=len(lists),
            num_rows=num_rows,
            refused=flag.array,
        )
        self._workspaces.put_back(workspace)

    def read(self, flag: CudaRowFlag) -> Download:
        with self._lock, self._launcher.device():
            last = self._order.begin((flag,), flag.last_update, is_step=False)
            try:
                if flag.unchecked is not None:
                    self.settle(flag)
                return self._launcher.download(flag.array)
            finally:
                self._order.end(last, (flag,))

    def clear(self, flag: CudaRowFlag) -> None:
        with self._lock, self._launcher.device():
            last = self._order.begin((flag,), flag.last_update, is_step=False)
            try:
                self._launcher.upload(flag.array, np.zeros(2, np.uint64))
            finally:
                self._order.end(last, (flag,))

    def memory(self, flag: CudaRowFlag) -> Any:
        with self._lock, self._launcher.device():
            self.settle(flag)
            return flag.array

    def join(self, flag: CudaRowFlag, other: Any) -> None:
        with self._lock, self._launcher.device():
            last = self._order.begin((flag,), flag.last_update, is_step=False)
            try:
                self.settle(flag)
                array = flag.array
                array[...] = self._launcher.xp.where(array[0] == 0, other, array)
            finally:
                self._order.end(last, (flag, other))

    def unless_set(self, flag: CudaRowFlag, new: Any, old: Any) -> Any:
        with self._lock, self._launcher.device():
            self.settle(flag)
            return self._launcher.xp.where(flag.array[0] == 0, new, old)
