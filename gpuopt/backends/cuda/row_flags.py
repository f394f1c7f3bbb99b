"""Flags in device memory that say whether a gradient names a row that its variable lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import ROW_THREADS, num_blocks
from gpuopt.backends.cuda.launcher import Download, Launcher
from gpuopt.backends.cuda.parameters import name_of


class CudaRowFlag:
    """See `RowFlag`."""

    __slots__ = ("array", "last_update")

    def __init__(self, array: Any) -> None:
        self.array = array
        self.last_update: Any = None


class CudaRowFlags:
    """See `RowFlags`. Kernels read a flag before they write anything."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def new(self) -> CudaRowFlag:
        with self._launcher.device():
            return CudaRowFlag(self._launcher.xp.zeros(2, dtype=np.uint64))

    def check(self, flag: CudaRowFlag, number: int, rows: Any, height: int) -> None:
        if not rows.size:
            return
        with self._launcher.device():
            rows = self._launcher.xp.ascontiguousarray(rows)
            self._launcher.launch(
                kernels.check_rows(name_of(rows.dtype)),
                num_blocks(rows.size, ROW_THREADS, self._launcher.num_multiprocessors),
                ROW_THREADS,
                rows=rows,
                num_rows=rows.size,
                height=height,
                variable=number,
                refused=flag.array,
            )

    def read(self, flag: CudaRowFlag) -> Download:
        with self._launcher.device():
            return self._launcher.download(flag.array)

    def clear(self, flag: CudaRowFlag) -> None:
        with self._launcher.device():
            self._launcher.upload(flag.array, np.zeros(2, np.uint64))
