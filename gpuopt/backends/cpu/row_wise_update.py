"""Updates of whole rows in host memory, for rules with numbers of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled import CompiledRule, compiled_rules
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.row_groups import RowGroups
from gpuopt.backends.cpu.threads import share_out
from gpuopt.rules.update_rule import MEAN_SQUARE, UpdateRule

Array = np.ndarray[Any, Any]

# Loading a row from a random place in memory costs several times as much as its arithmetic.
ROW_FACTOR = 4


def update_every_row(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a row-wise rule to all rows of a plan's variables; see `Backend.apply_dense`."""
    overlaps = plan.memory.overlaps
    apart = [each.copy() if overlaps(each) else each for each in gradients]
    compiled: Sequence[CompiledRule] = ()
    if plan.size >= limits.large_elements:
        compiled = compiled_rules(rule, plan.real, scalars)
    for (var, slots), gradient, group in zip(plan.targets, apart, plan.groups, strict=True):
        if not var.size:
            continue
        # A scalar is one row.
        written = [np.atleast_1d(array) for array in (var, *slots)]
        values = np.atleast_1d(gradient)
        if compiled and all(each.flags.carray and each.dtype == plan.real for each in written):
            values = np.require(values, plan.real, ["C", "ALIGNED"])
            every = np.arange(len(values) + 1)
            groups = RowGroups(every[:-1], every[:-1], every)
            threads = limits.threads_for(values.size)
            update_compiled(compiled[group], written, values, groups, threads)
        else:
            update_rows(rule, written, None, values, scalars[group], limits)


def update_compiled(
    compiled: CompiledRule,
    written: Sequence[Array],
    values: Array,
    groups: RowGroups,
    threads: int,
) -> None:
    """Adds up each row's values and updates the row, in one pass.

    Args:
        compiled: What to compute.
        written: [height, ...], variable and slots, contiguous.
        values: [num_rows, ...], contiguous, in other memory.
        groups: Which values belong to which row.
        threads: How many share the rows.
    """
    num_rows = len(groups.rows)
    # Threads that share the rows end at about the same time; one alone makes one call.
    height = -(-num_rows // (4 * threads)) if threads > 1 else num_rows
    share_out(
        lambda first: compiled.update_rows(
            written, values, groups, first, min(first + height, num_rows)
        ),
        range(0, num_rows, height),
        threads,
    )


def update_rows(
    rule: UpdateRule,
    written: Sequence[Array],
    rows: Array | None,
    sums: Array,
    scalars: Scalars,
    limits: CpuLimits,
) -> None:
    """Applies a row-wise rule as it is written, to copies of some rows at a time.

    Args:
        rule: What to compute.
        written: [height, ...], variable and slots, of any strides and dtypes.
        rows: [num_rows], unique: what is updated; None for all, in order.
        sums: [num_rows, ...], their gradients, in other memory.
        scalars: The rule's.
        limits: See `CpuLimits`.
    """
    real = compute_type(written[0].dtype)
    height = max(PlainRule.most_elements // max(sums[0].size, 1), 1)

    def update(first: int) -> None:
        part: Any = slice(first, first + height)
        grad = sums[part].astype(real, order="C", copy=False).reshape(len(sums[part]), -1)
        if rows is not None:
            part = rows[part]
        shapes = [array[part].shape for array in written]
        held = [np.array(array[part], real).reshape(len(grad), -1) for array in written]
        mean_square = np.mean(grad * grad, axis=1, keepdims=True)
        rule.apply(held[0], grad, *held[1:], **{**scalars, MEAN_SQUARE: mean_square})
        for array, shape, new in zip(written, shapes, held, strict=True):
            array[part] = new.reshape(shape)

    is_large = sums.size * ROW_FACTOR >= limits.large_elements
    threads = limits.threads_for(sums.size * ROW_FACTOR) if is_large else 1
    share_out(update, range(0, len(sums), height), threads)
