"""Where arrays lie in host memory: aligned, staggered, or side by side."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

Array = np.ndarray[Any, Any]

# A cache line, and an AVX-512 register.
ALIGNMENT_BYTES = 64
# Large arrays start at the same place of a page. Equal elements of several then fall into the same
# few places of the first-level cache, and a load waits for an unrelated store of the same offset.
_PAGE_BYTES = 4096
_STAGGER_BYTES = 5 * ALIGNMENT_BYTES
# What is smaller than this goes side by side.
_SMALL_BYTES = 16 * 1024
_BLOCK_BYTES = 1024 * 1024

_serial = itertools.count()
_of_this_thread = threading.local()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns new memory that starts at a cache line; large arrays start apart within a page."""
    size = math.prod(shape) * dtype.itemsize
    apart = next(_serial) * _STAGGER_BYTES % _PAGE_BYTES if size >= _PAGE_BYTES else 0
    boundary = _PAGE_BYTES if size >= _PAGE_BYTES else ALIGNMENT_BYTES
    memory = np.empty(size + boundary + apart, np.uint8)
    start = -memory.ctypes.data % boundary + apart
    return memory[start : start + size].view(dtype).reshape(shape)


def empty_group(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> list[Array]:
    """Returns memory for each shape; small ones that follow each other lie side by side.

    Only the first of those that lie side by side starts at a cache line.
    """
    sizes = [math.prod(shape) for shape in shapes]
    arrays: list[Array] = []
    while len(arrays) < len(shapes):
        first = last = len(arrays)
        total = 0
        while last < len(shapes) and sizes[last] * dtype.itemsize < _SMALL_BYTES:
            if (total + sizes[last]) * dtype.itemsize > _BLOCK_BYTES:
                break
            total += sizes[last]
            last += 1
        if last - first < 2:
            arrays.append(empty(shapes[first], dtype))
            continue
        block, start = empty((total,), dtype), 0
        for shape, size in zip(shapes[first:last], sizes[first:last], strict=True):
            arrays.append(block[start : start + size].reshape(shape))
            start += size
    return arrays


def joined(flats: Sequence[Array]) -> Array | None:
    """Returns one flat array over flat arrays that lie side by side, or None if they do not."""
    bounds = [byte_bounds(flat) for flat in flats]
    if any(before[1] != after[0] for before, after in itertools.pairwise(bounds)):
        return None
    total = sum(flat.size for flat in flats)
    # Memory of different owners may touch, too; an array keeps only its own owner alive.
    if len({id(owner(flat)) for flat in flats}) > 1:
        return None
    return np.lib.stride_tricks.as_strided(flats[0], (total,), flats[0].strides)


def owner(array: Array) -> Array:
    """Walks to the array that the memory was first known as."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def scratch(dtypes: Sequence[np.dtype[Any]], size: int) -> list[Array]:
    """Returns flat arrays of `size` elements that this thread may use until it asks again."""
    buffers: list[Array] = _of_this_thread.__dict__.setdefault("buffers", [])
    for position, dtype in enumerate(dtypes):
        if position == len(buffers):
            buffers.append(empty((0,), np.dtype(np.uint8)))
        if buffers[position].nbytes < size * dtype.itemsize:
            buffers[position] = empty((size * dtype.itemsize,), np.dtype(np.uint8))
    return [
        buffer[: size * dtype.itemsize].view(dtype)
        for buffer, dtype in zip(buffers, dtypes, strict=False)
    ]
