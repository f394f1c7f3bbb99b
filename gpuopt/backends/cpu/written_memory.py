"""The memory that a plan's updates write to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from numpy.lib.array_utils import byte_bounds

from gpuopt.backends.cpu.memory import Array, owner


class WrittenMemory:
    """Ranges of memory, and who owns them; it keeps nothing alive.

    Attributes:
        owners: Ids of the arrays that own it.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        owners = [owner(array) for array in arrays]
        self.owners = set(map(id, owners))
        # Memory from a memoryview or a memory map is recognised by its bounds alone: the arrays
        # that end there have nothing in common, and one may be a view of another's owner.
        self._is_lent = any(array.base is not None for array in owners)
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(byte_bounds(array) for array in arrays if array.size):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlaps(self, array: Array) -> bool:
        """Whether an array has a part of this memory, by its bounds."""
        if not self._is_lent:
            if array.base is None and id(array) not in self.owners:
                return False
            root = owner(array)
            if root.base is None and id(root) not in self.owners:
                return False
        if not array.size:
            return False
        start, end = byte_bounds(array)
        # The number of spans that end at or before the array's start, and of those that start
        # before its end.
        return bisect_right(self._ends, start) < bisect_left(self._starts, end)
