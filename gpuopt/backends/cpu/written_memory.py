"""The memory that a plan's updates write to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.cpu.memory import Array, owner


class WrittenMemory:
    """Ranges of memory and the arrays that own them, none of which is kept alive.

    Attributes:
        owners: Ids of the arrays that own it.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        # Memory that no array owns, a memory map's for instance, is recognised by its bounds alone.
        self.owners = {id(owner(array)) for array in arrays}
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
        if array.base is None and id(array) not in self.owners:
            return False
        root = owner(array)
        is_apart = root.base is None and id(root) not in self.owners
        if is_apart or not array.size:
            return False
        start, end = byte_bounds(array)
        # The number of spans that end at or before the array's start, and of those that start
        # before its end.
        return bisect_right(self._ends, start) < bisect_left(self._starts, end)

    @classmethod
    def joined(cls, memories: Sequence[WrittenMemory]) -> WrittenMemory:
        """Returns all of several memories as one."""
        if len(memories) == 1:
            return memories[0]
        joined = cls([])
        joined.owners = set().union(*(memory.owners for memory in memories))
        joined._set_spans(
            chain.from_iterable(zip(m._starts, m._ends, strict=True) for m in memories)
        )
        return joined
