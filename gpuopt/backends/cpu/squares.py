"""Sums of squares in host memory, in the same order as kernels/clip.cu adds them up."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.compiler import build, why_not_compiled
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.threads import share_out
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.functions import TYPES
from gpuopt.rules.sources import kernel_root

Array = np.ndarray[Any, Any]

# As `CLIP_THREADS` and `CLIP_CHUNK` of the kernels.
LANES = 256
CHUNK = 16384
MADE_SMALLER = 2.0**-80
_PACK_BYTES = 16
# Elements that numpy goes through at a time: their squares stay in the cache.
_AT_ONCE = 16 * CHUNK

_SOURCE = """
#include "cpu/squares.hpp"

extern "C" void sum_chunks(
    const gpuopt::SquaredChunk<{real}>* chunks, long long num_chunks, double* sums,
    long long* taken) {{
  gpuopt::sum_chunks(chunks, num_chunks, sums, taken);
}}
"""


def sum_of_squares(arrays: Sequence[Array], limits: CpuLimits, is_wide: bool = False) -> np.float64:
    """Returns the sum of the squares of all elements of arrays of one dtype, in its compute type.

    An array's elements are divided into chunks, and a chunk's among 256 lanes, a pack of 16 bytes
    in turn. The squares at one place of a lane's packs are added up in order, then the sums of
    neighbouring places, and at last those of the lanes, each with the one that is half of them
    further. The sums of chunks, in float64, are added up likewise. With `is_wide`, the sum may be
    more than float32 holds; else it is infinite then.
    """
    return ignore_fp_warnings(_sum_of_squares, arrays, limits, is_wide)


def _sum_of_squares(arrays: Sequence[Array], limits: CpuLimits, is_wide: bool) -> np.float64:
    flat = [np.ascontiguousarray(array).reshape(-1) for array in arrays if array.size]
    if not flat:
        return np.float64(0)
    dtype, size = flat[0].dtype, sum(array.size for array in flat)
    real = np.dtype(compute_type(dtype))
    is_large = size >= limits.large_elements and why_not_compiled() is None
    library = _library(real) if dtype == real and is_large else None
    if library is None:
        sums = _sum_by_numpy(flat, real)
    else:
        sums = _sum_compiled(library, flat, limits.threads_for(size))
    if is_wide and real == np.float32 and np.isinf(sums).any():
        chunks, beyond = _chunks(flat), np.flatnonzero(np.isinf(sums))
        large = [chunks[number] for number in beyond]
        sums[beyond] = _sum_by_numpy(large, real, real.type(MADE_SMALLER)) / MADE_SMALLER**2
    rows = np.zeros((-(-sums.size // LANES), LANES))
    rows.reshape(-1)[: sums.size] = sums
    return np.float64(_halved(_added(rows[np.newaxis]))[0])


def _chunks(flat: Sequence[Array]) -> list[Array]:
    return [array[i : i + CHUNK] for array in flat for i in range(0, array.size, CHUNK)]


def _sum_by_numpy(flat: Sequence[Array], real: np.dtype[Any], by: Any = 1) -> Array:
    """Returns the sum of the squares of each chunk, of elements multiplied by `by`."""
    pack = _PACK_BYTES // flat[0].itemsize
    row = LANES * pack
    chunks = _chunks(flat)
    sums = np.empty(len(chunks))
    # Chunks that have as many rows go together. A square of 0 changes no sum.
    by_height: dict[int, list[int]] = {}
    for number, chunk in enumerate(chunks):
        by_height.setdefault(-(-chunk.size // row), []).append(number)
    for height, numbers in by_height.items():
        at_once = _AT_ONCE // (height * row)
        for first in range(0, len(numbers), at_once):
            some = numbers[first : first + at_once]
            values = np.zeros((len(some), height * row), real)
            for target, number in zip(values, some, strict=True):
                target[: chunks[number].size] = chunks[number]
            if by != 1:
                values *= by
            values *= values
            lanes = _added(values.reshape(len(some), height, row)).reshape(-1, LANES, pack)
            while lanes.shape[2] > 1:
                lanes = lanes[:, :, ::2] + lanes[:, :, 1::2]
            sums[some] = _halved(lanes[:, :, 0])
    return sums


def _added(rows: Array) -> Array:
    """Adds up [:, num_rows, :] in order."""
    sums: Array = rows[:, 0].copy()
    for row in range(1, rows.shape[1]):
        sums += rows[:, row]
    return sums


def _halved(lanes: Array) -> Array:
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _sum_compiled(library: ctypes.CDLL, flat: Sequence[Array], threads: int) -> Array:
    flat = [np.require(array, requirements="A") for array in flat]
    sizes = np.array([array.size for array in flat], np.intp)
    counts = -(-sizes // CHUNK)
    owners = np.repeat(np.arange(len(flat)), counts)
    begins = (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK
    addresses = np.array([array.ctypes.data for array in flat], np.intp)[owners]
    table = np.column_stack(
        [addresses + begins * flat[0].itemsize, np.minimum(sizes[owners] - begins, CHUNK)]
    )
    sums, taken = np.empty(len(table)), np.zeros(1, np.int64)

    def share(_: int) -> None:
        library.sum_chunks(
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_longlong(len(table)),
            ctypes.c_void_p(sums.ctypes.data),
            ctypes.c_void_p(taken.ctypes.data),
        )

    share_out(share, range(threads), threads)
    return sums


@cache
def _library(real: np.dtype[Any]) -> ctypes.CDLL | None:
    library = build(f"squares-{real}", _SOURCE.format(real=TYPES[real.name]), [kernel_root()])
    if library is not None:
        library.sum_chunks.restype = None
    return library
