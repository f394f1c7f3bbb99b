"""Flags in device memory that say whether a gradient names a row that its variable lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import ROW_THREADS, num_blocks
from gpuopt.backends.cuda.launcher import Download, Launcher
from gpuopt.backends.cuda.parameters import name_of


class CudaRowFlags:
    """See `RowFlags`. Kernels read a flag before they write anything."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def new(self) -> Any:
        with self._launcher.device():
            return self._launcher.xp.zeros(2, dtype=np.uint64)

    def check(self, flag: Any, number: int, rows: Any, height: int) -> None:
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
                refused=flag,
            )

    def read(self, flag: Any) -> Download:
        with self._launcher.device():
            return self._launcher.download(flag)

    def clear(self, flag: Any) -> None:
        with self._launcher.device():
            self._launcher.upload(flag, np.zeros(2, np.uint64))
