"""Memory for variables on the host: aligned, staggered, or side by side."""

from __future__ import annotations

import itertools
import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.lib.stride_tricks import as_strided

Array = np.ndarray[Any, Any]

# A cache line, and an AVX-512 register.
ALIGNMENT_BYTES = 64
# numpy's large arrays all start at the same offset in a page. Elements of equal index then compete
# for the same sets of the first-level cache, and a load waits for a store to an address with the
# same lower bits. So each of our large arrays starts at another offset than the one before.
_PAGE_BYTES = 4096
_STAGGER_BYTES = 5 * ALIGNMENT_BYTES
# Arrays smaller than this are cut from one block, one after the other, so that variables made one
# after the other are contiguous and can be updated as one. A block is freed with the last of its
# arrays.
_SMALL_BYTES = 16 * 1024
_BLOCK_BYTES = 64 * 1024

_serial = itertools.count()
_of_this_thread = threading.local()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns new memory that starts at a cache line; large arrays start apart within a page."""
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALL_BYTES:
        memory, start = _cut_from_block(size)
    else:
        apart = next(_serial) * _STAGGER_BYTES % _PAGE_BYTES
        memory = np.empty(size + _PAGE_BYTES + apart, np.uint8)
        start = -memory.ctypes.data % _PAGE_BYTES + apart
    return memory[start : start + size].view(dtype).reshape(shape)


def read_only(array: Array) -> Array:
    """Returns the array, or a view of it that cannot be written to."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def contiguous_runs(flats: Sequence[Array]) -> list[Array]:
    """Views flat arrays of one dtype as few: neighbours in memory of one owner become one."""
    starts = [flat.__array_interface__["data"][0] for flat in flats]
    joined: list[Array] = []
    first = size = 0
    for position, flat in enumerate(flats):
        size += flat.size
        end, next_start = starts[position] + flat.nbytes, starts[position + 1 : position + 2]
        # Not of two owners: a view of both would keep only one owner's memory alive.
        if next_start != [end] or owner(flat) is not owner(flats[position + 1]):
            is_alone = first == position
            joined.append(flat if is_alone else as_strided(flats[first], (size,), flat.strides))
            first, size = position + 1, 0
    return joined


def _cut_from_block(size: int) -> tuple[Array, int]:
    # Each thread has a block of its own, so that none waits for another.
    block, start = getattr(_of_this_thread, "block", (None, _BLOCK_BYTES))
    if block is None or start + size > _BLOCK_BYTES:
        block = np.empty(_BLOCK_BYTES + ALIGNMENT_BYTES, np.uint8)
        block = block[-block.ctypes.data % ALIGNMENT_BYTES :]
        start = 0
    taken = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    _of_this_thread.block = block, start + taken
    return block, start


def owner(array: Array) -> Array:
    """Returns the array that an array is, in the end, a view of."""
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


class WrittenMemory:
    """Ranges of memory and the arrays that own them, none of which is kept alive."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        roots = [owner(array) for array in arrays]
        self._owners = {id(root) for root in roots}
        # Memory that comes from elsewhere, as a memory map's or a buffer's, may be owned by any
        # array after all.
        self._is_owned = all(root.flags.owndata for root in roots)
        self._set_spans(byte_bounds(array) for array in arrays if array.size)

    def _set_spans(self, spans: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlaps(self, array: Array) -> bool:
        """Whether an array has a part of this memory, by its bounds."""
        if self._is_owned:
            root = array if array.base is None else owner(array)
            if root.base is None and id(root) not in self._owners:
                return False
        if not array.size:
            return False
        start, end = byte_bounds(array)
        # The number of spans that end at or before the array's start, and of those that start
        # before its end.
        return bisect_right(self._ends, start) < bisect_left(self._starts, end)

    def apart(self, array: Array, dtype: np.dtype[Any] | None = None) -> Array:
        """Returns an array, contiguous, or a copy if updates write to it; `dtype` converts it."""
        flat: Array = np.require(array, dtype, ["C", "ALIGNED"])
        return flat.copy() if flat is array and self.overlaps(array) else flat

    @classmethod
    def joined(cls, memories: Sequence[WrittenMemory]) -> WrittenMemory:
        """Returns all of several memories as one."""
        if len(memories) == 1:
            return memories[0]
        joined = cls([])
        joined._owners = set().union(*(memory._owners for memory in memories))
        joined._is_owned = all(memory._is_owned for memory in memories)
        joined._set_spans(
            chain.from_iterable(zip(m._starts, m._ends, strict=True) for m in memories)
        )
        return joined
