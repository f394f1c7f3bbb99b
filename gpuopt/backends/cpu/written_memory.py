"""The memory that a plan's updates write to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.cpu.memory import Array, owner


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
