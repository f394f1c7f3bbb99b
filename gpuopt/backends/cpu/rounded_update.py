"""Updates in host memory of which bfloat16 variables and slots are rounded stochastically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.dense_update import update_alone
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.master_copies import write_copies
from gpuopt.backends.cpu.mixed_update import update_mixed
from gpuopt.backends.cpu.row_groups import group_rows, sum_rows
from gpuopt.quietly import quietly
from gpuopt.rules.moving_average import AVERAGE_WEIGHT, follow
from gpuopt.rules.rounded import BFLOAT16, round_at_random
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# The temporaries of a part stay in the second-level cache.
_PART = 1 << 14


def update_rounded(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`."""
    update_own(rule, plan.targets, gradients, scalars, limits, plan.groups)


def update_rounded_rows(
    rule: UpdateRule,
    other_rows: UpdateRule | None,
    plan: DensePlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
    first: int,
) -> None:
    """Updates the rows of a table that have a gradient, and others by `other_rows` if given.

    `first` is that of `group_rows`.
    """
    [target] = plan.targets
    values = values.astype(np.float32)
    groups = group_rows(rows, first)
    sums, order = quietly(lambda: sum_rows(values, groups))
    rows = groups.rows[order]
    touched = Target(target.var[rows], [slot[rows] for slot in target.slots])
    if other_rows is not None:
        of_others = [other_rows.own(scalars)]
        if not update_mixed(other_rows, plan, None, of_others, limits):
            zero = np.zeros(target.var.shape, np.float32)
            update_rounded(other_rows, plan, [zero], of_others, limits)
            if plan.copies:
                write_copies(plan, limits)
    update_own(rule, [touched], [sums], [scalars], limits, rows=rows)
    for array, new_rows in zip(
        (target.var, *target.slots), (touched.var, *touched.slots), strict=True
    ):
        array[rows] = new_rows


def update_own(
    rule: UpdateRule,
    targets: Sequence[Target],
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
    groups: Sequence[int] | None = None,
    rows: Array | None = None,
) -> None:
    """Applies a rule, rounded or not, to variables without a plan.

    Float32 copies of what is rounded are there for as long as this takes.

    Args:
        rule: Computes the step.
        targets: The variables, or copies of them.
        gradients: One for each.
        scalars: Those of each group.
        limits: See `CpuLimits`.
        groups: The number of each variable's group; None for one group.
        rows: Of the only variable: which rows of a table it has. None if it is the whole.
    """
    if not rule.is_rounded:
        update_alone(rule, targets, gradients, scalars, limits, groups)
        return
    copies = [_copies(target) for target in targets]
    update_alone(rule, copies, gradients, scalars, limits, groups)
    for target, copy, group in zip(targets, copies, groups or [0] * len(targets), strict=True):
        _round_and_write(rule, target, copy, _numbers(target.var, rows), scalars[group])


def _numbers(var: Array, rows: Array | None) -> Array:
    """Returns the number of each element in its variable."""
    if rows is None:
        return np.arange(var.size, dtype=np.uint64)
    width = np.uint64(math.prod(var.shape[1:]))
    firsts = rows.astype(np.uint64)[:, np.newaxis] * width
    return (firsts + np.arange(width, dtype=np.uint64)).reshape(-1)


def _copies(target: Target) -> Target:
    var, *slots = [np.array(each, np.float32, order="C") for each in (target.var, *target.slots)]
    return Target(var, slots)


def _round_and_write(
    rule: UpdateRule, target: Target, copy: Target, numbers: Array, scalars: Scalars
) -> None:
    """Writes new values, rounded at random where they are not stored as float32.

    An average then moves towards the variable as it is written, and is itself rounded to nearest:
    the rule has moved a copy of it towards what was not rounded yet.
    """
    first = int(rule.is_averaged)
    written = [target.var, *target.slots[first:]]
    values = [each.reshape(-1) for each in (copy.var, *copy.slots[first:])]
    for at in range(0, numbers.size, _PART):
        part = slice(at, at + _PART)
        chosen = [
            each[part] if stored.dtype == BFLOAT16 else None
            for each, stored in zip(values, written, strict=True)
        ]
        parts = round_at_random(chosen, numbers[part], scalars)
        for value, rounded in zip(values, parts, strict=True):
            if rounded is not None:
                value[part] = rounded
    # A bfloat16 stays itself.
    for stored, value in zip(written, values, strict=True):
        stored[...] = value.reshape(stored.shape)
    for average in target.slots[:first]:
        moved = np.array(average, np.float32)
        follow(moved, np.asarray(target.var, np.float32), scalars[AVERAGE_WEIGHT])
        average[...] = moved
