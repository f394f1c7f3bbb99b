"""Updates of bfloat16 variables in host memory that are rounded stochastically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.row_groups import group_rows, sum_rows
from gpuopt.backends.cpu.split_update import update_alone
from gpuopt.quietly import quietly
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
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`.

    Float32 copies of variables and slots are there for as long as this takes.
    """
    copies = [_copies(target) for target in plan.targets]
    update_alone(rule, copies, gradients, scalars, limits, plan.groups)
    for target, copy, group in zip(plan.targets, copies, plan.groups, strict=True):
        _write(target, copy, np.arange(copy.var.size, dtype=np.uint64), scalars[group])


def update_rounded_rows(
    rule: UpdateRule,
    other_rows: UpdateRule | None,
    plan: DensePlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
) -> None:
    """Updates the rows of a table that have a gradient, and others by `other_rows` if given."""
    [target] = plan.targets
    values = values.astype(np.float32)
    groups = group_rows(rows)
    sums, order = quietly(lambda: sum_rows(values, groups))
    rows = groups.rows[order]
    touched = Target(target.var[rows], [slot[rows] for slot in target.slots])
    copy = _copies(touched)
    if other_rows is not None:
        zero = np.zeros(target.var.shape, np.float32)
        update_rounded(other_rows, plan, [zero], [other_rows.own(scalars)], limits)
    update_alone(rule, [copy], [sums], [scalars], limits)
    width = np.uint64(math.prod(target.var.shape[1:]))
    firsts = rows.astype(np.uint64)[:, np.newaxis] * width
    _write(touched, copy, (firsts + np.arange(width, dtype=np.uint64)).reshape(-1), scalars)
    for array, new_rows in zip(
        (target.var, *target.slots), (touched.var, *touched.slots), strict=True
    ):
        array[rows] = new_rows


def _copies(target: Target) -> Target:
    var, *slots = [np.array(each, np.float32, order="C") for each in (target.var, *target.slots)]
    return Target(var, slots)


def _write(target: Target, copy: Target, numbers: Array, scalars: Scalars) -> None:
    """Writes new values, rounded where they are not stored as float32."""
    values = [each.reshape(-1) for each in (copy.var, *copy.slots)]
    new = [np.empty(each.size, BFLOAT16) for each in values]
    for at in range(0, numbers.size, _PART):
        part = slice(at, at + _PART)
        parts = round_at_random([each[part] for each in values], numbers[part], scalars)
        for array, rounded in zip(new, parts, strict=True):
            array[part] = rounded
    for stored, value, rounded in zip((target.var, *target.slots), values, new, strict=True):
        chosen = rounded if stored.dtype == BFLOAT16 else value
        stored[...] = chosen.reshape(stored.shape)
