"""Dense updates in host memory by one call of compiled code, from a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.chunks import Chunks
from gpuopt.backends.cpu.forms.compiled import CompiledRule, Table, address_of
from gpuopt.backends.cpu.memory import Array
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.written_memory import WrittenMemory


class _Cut(NamedTuple):
    """The variables, cut into chunks for a number of threads; replaced as a whole.

    Attributes:
        threads: The number.
        chunks: All chunks.
        num_joined: How many of them, the first ones, have joined gradients.
        table: The chunks, if all gradients are joined.
    """

    threads: int
    chunks: Chunks
    num_joined: int
    table: Table


class CompiledUpdate:
    """Variables of one plan and a compiled rule for them.

    Gradients of small variables are joined: to find where an array is takes numpy longer than to
    copy it.
    """

    def __init__(
        self,
        rule: CompiledRule,
        arrays: Sequence[Sequence[Array]],
        groups: Sequence[int],
        first_numbers: Sequence[int],
        memory: WrittenMemory,
        positions: Sequence[int],
        num_joined: int,
    ) -> None:
        """Takes variables.

        Args:
            rule: The rule that updates them.
            arrays: The arrays of each, contiguous and not empty.
            groups: The number of each one's group.
            first_numbers: See `Target`.
            memory: All that is written.
            positions: Where their gradients stand among those that `update` takes.
            num_joined: How many of them, the first ones, are small.
        """
        self._rule = rule
        self._given = arrays, groups, first_numbers
        self._memory = memory
        self._num_joined = num_joined
        self._joined, self._large = positions[:num_joined], positions[num_joined:]
        self._size = sum(each[0].size for each in arrays)
        self._itemsize = rule.stored.gradient.dtypes[0].itemsize
        ends = np.cumsum([0, *[each[0].size for each in arrays[:num_joined]]]) * self._itemsize
        self._begins = np.zeros(len(arrays), np.intp)
        self._begins[:num_joined] = ends[:-1]
        self._cut = self._cut_for(1)

    def update(
        self, gradients: Sequence[Array] | None, scalars: Sequence[Scalars], threads: int
    ) -> None:
        """Updates the variables.

        Args:
            gradients: Those of the variables, and any others; None if they are zero everywhere.
            scalars: The rule's, of each group.
            threads: How many share the work.
        """
        cut = self._cut
        if threads != cut.threads:
            cut = self._cut = self._cut_for(threads)
        joined, packed = None, self._rule.pack(scalars)
        if gradients is None:
            table = Table(cut.chunks.table(None))
        else:
            joined = b"".join([gradients[at].tobytes() for at in self._joined])
            table = cut.table
            if self._large:
                large = [self._memory.apart(gradients[at]) for at in self._large]
                begins = self._begins.copy()
                begins[self._num_joined :] = [each.ctypes.data for each in large]
                table = Table(cut.chunks.table(begins, self._itemsize), cut.num_joined)
        if threads == 1:
            self._rule.update_chunks(table, packed, joined)
            return
        taken = np.zeros(1, np.int64)
        work = table, packed, joined, address_of(taken)
        share_out(lambda _: self._rule.update_chunks(*work), range(threads), threads)

    def _cut_for(self, threads: int) -> _Cut:
        arrays, groups, first_numbers = self._given
        longest = max(min(CompiledRule.most_elements, -(-self._size // threads)), 1)
        per_block = self._rule.stored.codecs.per_block
        chunks = Chunks(arrays, groups, longest, first_numbers, per_block=per_block)
        num_joined = chunks.num_of_first(self._num_joined)
        table = Table(chunks.table(self._begins, self._itemsize), num_joined)
        return _Cut(threads, chunks, num_joined, table)
