"""What a launch does: the bytes that it moves, and how long its blocks wait for loads.

A load that needs another one's result waits for it. `Waits` counts such loads, one after another;
loads that are in flight together count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Microseconds, as in the review of 29a79d3; all GPUs alike. An H100's L2 needs about 260 cycles,
# its DRAM 480 to 1,000, more of them when it is busy.
L2_US = 0.2
DRAM_US = 0.7
# A barrier, or a load from shared memory and what is computed from it: about 50 cycles.
SHARED_US = 0.03


class Waits(NamedTuple):
    """How many things a thread waits for, one after another."""

    l2: float = 0
    dram: float = 0
    shared: float = 0

    @property
    def us(self) -> float:
        return L2_US * self.l2 + DRAM_US * self.dram + SHARED_US * self.shared

    @property
    def loads(self) -> float:
        return self.l2 + self.dram

    def and_then(self, other: Waits) -> Waits:
        return Waits(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, count: float) -> Waits:
        return Waits(*(count * mine for mine in self))


L2, DRAM, SHARED = Waits(l2=1), Waits(dram=1), Waits(shared=1)


def one_by_one(*waits: Waits) -> Waits:
    """Returns the sum of waits."""
    total = Waits()
    for each in waits:
        total = total.and_then(each)
    return total


class Work(NamedTuple):
    """What a launch does.

    Attributes:
        num_bytes: Read from memory, and written for others than the step's kernels.
        cached_bytes: Read and written besides: one kernel leaves them in L2 for the next one.
        items: How many chunks, tiles, runs, or passes of threads; blocks take them in turn.
        items_per_block: How many a block works on at once.
        begin: A block's waits before its first item.
        item: The waits of an item, on average.
        filling: The waits of the first item before its data flow.
        longest: The waits of the longest item.
    """

    num_bytes: float
    cached_bytes: float
    items: int
    items_per_block: int
    begin: Waits
    item: Waits
    filling: Waits
    longest: Waits


class Rows(NamedTuple):
    """What the data of a sparse gradient say.

    Attributes:
        num_rows: The gradient's, repeated ones included.
        width: How many elements a row has.
        slots: How many slots the optimizer has.
        runs: How many different rows occur how often: {occurrences: rows}.
    """

    num_rows: int
    width: int
    slots: int
    runs: Mapping[int, int]

    @property
    def different(self) -> int:
        return sum(self.runs.values())

    def occurrences(self, above: int) -> int:
        """How many rows of the gradient belong to runs of more than so many."""
        return sum(length * count for length, count in self.runs.items() if length > above)

    def parts(self, size: int) -> int:
        """How many parts of `size` positions the runs of more than twice as many have."""
        return sum(
            (length // size + 1) * count for length, count in self.runs.items() if length > 2 * size
        )


class Dense(NamedTuple):
    """What a dense step updates.

    Attributes:
        elements: Of all variables.
        slots: How many slots the optimizer has.
    """

    elements: int
    slots: int


Data = Rows | Dense
