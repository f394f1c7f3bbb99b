"""Updates of variables in host memory whose slots are in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars, Target
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled_blocks import CompiledBlocks, compiled_blocks
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import Array, read_only
from gpuopt.backends.cpu.row_groups import group_rows, sum_rows
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.quietly import quietly
from gpuopt.rules.slot_codes import BLOCK, Blocks, Coding, blocks_of, decode, encode
from gpuopt.rules.update_rule import UpdateRule

# The plain form's temporaries stay in the second-level cache.
_PLAIN_BLOCKS = 32
# Short enough that all threads finish at about the same time.
_COMPILED_BLOCKS = 512


class CodedPlan(DensePlan):
    """Variables of one dtype whose slots are in 8 bits; see `Backend.plan_dense`.

    Attributes:
        codings: Those of the rule's slots.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        memory: WrittenMemory,
        limits: CpuLimits,
        groups: Sequence[int] | None,
        codings: Sequence[Coding],
    ) -> None:
        super().__init__(targets, memory, limits, groups)
        self.codings = codings


class _Work(NamedTuple):
    """One variable's blocks, and where its new values go if these are of a copy."""

    blocks: list[Blocks]
    copy: Array
    var: Array

    def write_back(self) -> None:
        if self.copy is not self.var:
            self.var[...] = self.copy


def update_coded(
    rule: UpdateRule,
    plan: CodedPlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`."""
    if not plan.size:  # as of a gradient without rows
        return
    gradients = plan.without_overlap(gradients)
    coded = len(plan.codings)
    work = [_work_of(*each, coded) for each in zip(plan.targets, gradients, strict=True)]
    threads = 1 if plan.size < limits.large_elements else limits.threads_for(plan.size)
    groups = plan.groups
    if rule.sums:
        of_groups = [scalars[group] for group in groups]
        sums = partial(_scalars_with_sums, rule, plan.codings)
        scalars = [sums(*each) for each in zip(work, of_groups, strict=True)]
        groups = range(len(work))
    compiled = None
    if plan.size >= limits.compiled_elements and plan.targets[0].var.dtype == np.float32:
        compiled = compiled_blocks(rule, plan.codings, scalars)
    if compiled is not None:
        table = _table(compiled, work, groups)
        taken = np.zeros(1, np.int64)
        share_out(lambda _: compiled.update_chunks(table, taken), range(threads), threads)
    else:
        tasks = [
            partial(_update_blocks, rule, plan.codings, blocks.part(at, at + _PLAIN_BLOCKS), of)
            for each, of in zip(work, (scalars[group] for group in groups), strict=True)
            for blocks in each.blocks
            for at in range(0, len(blocks.arrays[0]), _PLAIN_BLOCKS)
        ]
        share_out(lambda task: task(), tasks, threads)
    for each in work:
        each.write_back()


def update_coded_rows(
    rule: UpdateRule,
    other_rows: UpdateRule | None,
    plan: CodedPlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
    first: int,
) -> None:
    """Updates the rows of a table that have a gradient, and others by `other_rows` if given.

    The slots' blocks end at rows. `first` is that of `group_rows`.
    """
    [target] = plan.targets
    written = [target.var, *target.slots]
    values = values.astype(np.float32, copy=False)
    groups = group_rows(rows, first)
    sums, order = quietly(lambda: sum_rows(values, groups))
    rows = groups.rows[order]
    touched = [array[rows] for array in written]
    if other_rows is not None:
        zero = np.zeros(target.var.shape, np.float32)
        update_coded(other_rows, plan, [zero], [other_rows.own(scalars)], limits)
    own = CodedPlan(
        [Target(touched[0], touched[1:])], WrittenMemory(touched), limits, None, plan.codings
    )
    update_coded(rule, own, [sums], [scalars], limits)
    for array, new_rows in zip(written, touched, strict=True):
        array[rows] = new_rows


def _work_of(target: Target, gradient: Array, num_coded: int) -> _Work:
    var, slots = target
    copy = np.asarray(var, order="C")
    copy = copy if copy.flags.aligned else copy.copy()
    gradient = np.require(gradient, requirements=["C", "ALIGNED"]).reshape(var.shape)
    blocks = blocks_of([copy, gradient, *slots[:-num_coded]], slots[-num_coded:])
    return _Work(blocks, copy, var)


def _update_blocks(
    rule: UpdateRule, codings: Sequence[Coding], blocks: Blocks, scalars: Scalars
) -> None:
    written, gradient, codes = _divided(codings, blocks)
    shape = gradient.shape
    reals = _decoded(codings, blocks)
    grad = np.ascontiguousarray(gradient, np.float32).reshape(-1)
    rule.apply(reals[0], read_only(grad), *reals[1:], **scalars)
    for array, real in zip(written, reals, strict=False):
        array[...] = real.reshape(shape)
    # The slots of an element begin anew where one has no code.
    slots = reals[len(written) :]
    is_finite = np.logical_and.reduce([np.isfinite(slot) for slot in slots])
    for slot, coding, of_slot, scale in zip(slots, codings, codes, blocks.scales, strict=True):
        np.copyto(slot, 0, where=~is_finite)
        of_slot[...], scale[...] = encode(slot.reshape(shape), coding)


def _divided(codings: Sequence[Coding], blocks: Blocks) -> tuple[list[Array], Array, list[Array]]:
    """Returns the variable and what is stored as it is, the gradient, and the codes."""
    var, gradient, *slots = blocks.arrays
    num_averages = len(slots) - len(codings)
    return [var, *slots[:num_averages]], gradient, slots[num_averages:]


def _decoded(codings: Sequence[Coding], blocks: Blocks) -> list[Array]:
    """Returns flat float32 copies of the variable and its slots."""
    stored, _, codes = _divided(codings, blocks)
    reals = [np.array(each, np.float32) for each in stored]
    reals += map(decode, codes, blocks.scales, codings)
    return [each.reshape(-1) for each in reals]


def _scalars_with_sums(
    rule: UpdateRule, codings: Sequence[Coding], work: _Work, scalars: Scalars
) -> Scalars:
    """Returns the scalars of one variable, with its sums, added up in one order and in float64."""
    assert rule.terms is not None, "it has sums"
    sums = np.zeros(len(rule.sums))
    for blocks in work.blocks:
        for at in range(0, len(blocks.arrays[0]), _PLAIN_BLOCKS):
            part = blocks.part(at, at + _PLAIN_BLOCKS)
            var, *slots = _decoded(codings, part)
            grad = np.ascontiguousarray(part.arrays[1], np.float32).reshape(-1)
            terms = rule.terms(var, grad, *slots, **scalars)
            sums += [np.sum(each, dtype=np.float64) for each in terms]
    return {**scalars, **dict(zip(rule.sums, sums.astype(np.float32), strict=True))}


def _table(compiled: CompiledBlocks, work: Sequence[_Work], groups: Sequence[int]) -> Array:
    """Returns the chunks of all variables, for `CompiledBlocks.update_chunks`."""
    tables = []
    for each, group in zip(work, groups, strict=True):
        for arrays, scales in each.blocks:
            count, length = arrays[0].shape
            at_once = _COMPILED_BLOCKS * BLOCK // length
            starts = np.arange(0, count, at_once)
            numbers = np.minimum(at_once, count - starts)
            addresses = [array.ctypes.data + starts * array.strides[0] for array in arrays]
            addresses += [array.ctypes.data + starts * array.strides[0] for array in scales]
            distances = [arrays[0].strides[0] // 4, scales[0].strides[0] // 4]
            fixed = [length, *distances, compiled.scalars_addresses[group]]
            columns = [*addresses, numbers, *(np.full_like(starts, value) for value in fixed)]
            tables.append(np.column_stack(columns))
    return np.ascontiguousarray(np.concatenate(tables), np.intp)
