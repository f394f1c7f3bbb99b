"""Copies of rows on a GPU: one launch for all arrays, whatever their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import RowCopy
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import COPY_CHUNK, COPY_THREADS, PACK_BYTES, num_blocks
from gpuopt.backends.cuda.launcher import Launcher, to_device
from gpuopt.backends.cuda.structs import CopiedRows


def copy_rows(launcher: Launcher, copies: Sequence[RowCopy]) -> None:
    """Does what `Backend.copy_rows` does, on the current stream."""
    xp = launcher.xp
    strided = set(launcher.strided([copy.target for copy in copies]))
    # Kept until the launch is enqueued: some may be copies.
    sources: list[Any] = []
    table: list[CopiedRows] = []
    num_chunks = 0
    for position, copy in enumerate(copies):
        if position in strided:  # an array that a variable has adopted
            _assign(copy)
        elif copy.target[:1].nbytes:
            is_number = not isinstance(copy.source, xp.ndarray)
            sources.append(copy.source if is_number else xp.ascontiguousarray(copy.source))
            row = _described(launcher, copy._replace(source=sources[-1]), is_number, num_chunks)
            if row.num_words:
                table.append(row)
                num_chunks += -(-row.num_words // COPY_CHUNK)
    if not table:
        return
    launcher.launch(
        kernels.copy_rows(),
        num_blocks(num_chunks, 1, launcher.num_multiprocessors),
        COPY_THREADS,
        arrays=to_device(launcher, np.array(table, np.int64)),
        num_arrays=len(table),
        num_chunks=num_chunks,
    )


def _assign(copy: RowCopy) -> None:
    target, source, from_rows, to_rows = copy
    target[... if to_rows is None else to_rows] = source if from_rows is None else source[from_rows]


def _described(launcher: Launcher, copy: RowCopy, is_number: bool, first_chunk: int) -> CopiedRows:
    """Returns what the kernel takes for a copy between contiguous arrays."""
    target, source, from_rows, to_rows = copy
    num_rows = next(rows for rows in (from_rows, to_rows, target) if rows is not None).shape[0]
    row_bytes = target[:1].nbytes
    from_address = 0 if is_number else launcher.address(source)
    to_address = launcher.address(target)
    together = from_address | to_address | row_bytes
    word_bytes = min(together & -together, PACK_BYTES)
    low, high = _repeated(source, target.dtype) if is_number else (0, 0)
    return CopiedRows(
        target=to_address,
        source=from_address,
        from_rows=0 if from_rows is None else launcher.address(from_rows),
        to_rows=0 if to_rows is None else launcher.address(to_rows),
        low=low,
        high=high,
        word_bytes=word_bytes,
        row_words=row_bytes // word_bytes,
        num_words=num_rows * row_bytes // word_bytes,
        first_chunk=first_chunk,
    )


def _repeated(number: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Returns the bits of a number, repeated in 16 bytes."""
    item = np.asarray(number).astype(dtype).tobytes()
    low, high = np.frombuffer(item * (PACK_BYTES // len(item)), np.int64).tolist()
    return low, high
