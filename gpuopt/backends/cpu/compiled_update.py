"""Updates of variables that lie flat in memory, by compiled rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.chunks import Chunks
from gpuopt.backends.cpu.forms.compiled import CompiledRule, Table, address_of, compiled_rule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array, WrittenMemory
from gpuopt.backends.cpu.threads import share_out
from gpuopt.rules.update_rule import UpdateRule

_LIMITS = CpuLimits()


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
        """Updates the variables, by threads that share the work.

        `gradients` may have others beside theirs; None if they are zero everywhere.
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


def repeated_update(
    rule: UpdateRule,
    targets: Sequence[Target],
    gradients: Sequence[Array],
    groups: Sequence[int],
) -> Callable[[Sequence[Scalars]], None] | None:
    """Returns what updates all variables, given each group's scalars of their dtype.

    It calls a compiled rule with a table of addresses that was made once: to find gradients anew
    takes several times as long as to update a few thousand elements. It keeps all arrays alive.

    None where `Backend.apply_dense` has to make the update: where there is no compiler, where
    threads would share the work, and for arrays that are not flat, not of the type that rules
    compute in, or written and read.

    Args:
        rule: Without sums and slots of rows.
        targets: Variables and slots that share no memory.
        gradients: Of their shapes.
        groups: The number of each variable's group.
    """
    present = [position for position, gradient in enumerate(gradients) if gradient.size]
    targets = [targets[position] for position in present]
    gradients = [gradients[position] for position in present]
    written = [array for target in targets for array in target.arrays]
    dtypes = {array.dtype for array in (*written, *gradients)}
    if len(dtypes) != 1 or _LIMITS.threads_for(sum(each.size for each in gradients)) > 1:
        return None
    [dtype] = dtypes
    memory = WrittenMemory(written)
    if (
        dtype != compute_type(dtype)
        or not all(array.flags.carray for array in written)
        or not all(each.flags.c_contiguous and each.flags.aligned for each in gradients)
        or any(map(memory.overlaps, gradients))
    ):
        return None
    compiled = compiled_rule(rule, dtype)
    if compiled is None:
        return None
    chunks = Chunks(
        [target.arrays for target in targets],
        [groups[position] for position in present],
        compiled.most_elements,
    )
    begins = np.array([gradient.ctypes.data for gradient in gradients], np.intp)
    table = Table(chunks.table(begins, gradients[0].itemsize))
    return partial(_update, compiled, table, (targets, gradients))


def _update(
    rule: CompiledRule, table: Table, kept_alive: object, scalars: Sequence[Scalars]
) -> None:
    rule.update_chunks(table, rule.pack(scalars))
