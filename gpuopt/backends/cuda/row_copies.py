"""Copies of rows on a GPU: one launch for all arrays, whatever their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import RowCopy
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import COPY_CHUNK, COPY_THREADS, PACK_BYTES, num_blocks
from gpuopt.backends.cuda.launcher import Launcher
from gpuopt.backends.cuda.structs import CopiedRows


def copy_rows(launcher: Launcher, copies: Sequence[RowCopy]) -> None:
    """Does what `Backend.copy_rows` does, on the current stream."""
    xp = launcher.xp
    strided = set(launcher.strided([copy.target for copy in copies]))
    # Kept until the launch is enqueued: some may be copies.
    sources: list[Any] = []
    table: list[CopiedRows] = []
    num_chunks = 0
    for position, (target, source, from_rows, to_rows) in enumerate(copies):
        if position in strided:  # an array that a variable has adopted
            target[... if to_rows is None else to_rows] = (
                source if from_rows is None else source[from_rows]
            )
            continue
        is_number = not isinstance(source, xp.ndarray)
        row_bytes = target[:1].nbytes
        if to_rows is not None or from_rows is not None:
            num_rows = (from_rows if to_rows is None else to_rows).shape[0]
        else:
            num_rows = target.shape[0]
        if not row_bytes or not num_rows:
            continue
        sources.append(source if is_number else xp.ascontiguousarray(source))
        at, of = launcher.address(target), 0 if is_number else launcher.address(sources[-1])
        together = at | of | row_bytes
        word_bytes = min(together & -together, PACK_BYTES)
        low, high = _repeated(source, target.dtype) if is_number else (0, 0)
        row_words = row_bytes // word_bytes
        table.append(
            CopiedRows(
                at,
                of,
                0 if from_rows is None else launcher.address(from_rows),
                0 if to_rows is None else launcher.address(to_rows),
                low,
                high,
                word_bytes,
                row_words,
                num_rows * row_words,
                num_chunks,
            )
        )
        num_chunks += -(-num_rows * row_words // COPY_CHUNK)
    if not table:
        return
    arrays = xp.empty(len(CopiedRows._fields) * len(table), dtype=np.int64)
    launcher.upload(arrays, np.array(table, np.int64))
    launcher.launch(
        kernels.copy_rows(),
        num_blocks(num_chunks, 1, launcher.num_multiprocessors),
        COPY_THREADS,
        arrays=arrays,
        num_arrays=len(table),
        num_chunks=num_chunks,
    )


def _repeated(number: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Returns the bits of a number, repeated in 16 bytes."""
    item = np.asarray(number).astype(dtype).tobytes()
    low, high = np.frombuffer(item * (PACK_BYTES // len(item)), np.int64).tolist()
    return low, high
