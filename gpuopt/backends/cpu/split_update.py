"""Updates of bfloat16 variables beside which the rest of their float32 master copies is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.mixed_update import update_mixed
from gpuopt.backends.cpu.rounded_update import update_own
from gpuopt.backends.cpu.row_groups import group_rows, sum_rows
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.quietly import quietly
from gpuopt.rules.split import joined, split
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]


class SplitPlan(DensePlan):
    """Variables that are the upper halves of their master copies; see `Backend.plan_dense`.

    Attributes:
        remainders: uint16, the lower halves: one for each target.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        memory: WrittenMemory,
        limits: CpuLimits,
        groups: Sequence[int] | None,
        remainders: Sequence[Array],
    ) -> None:
        super().__init__(targets, memory, limits, groups)
        self.remainders = remainders

    @property
    def beside(self) -> Sequence[Array]:
        return self.remainders


def update_split(
    rule: UpdateRule,
    plan: SplitPlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`.

    The master copies are there for as long as this takes.
    """
    masters = [
        np.asarray(joined(var, rest))
        for (var, _), rest in zip(plan.targets, plan.remainders, strict=True)
    ]
    own = [Target(m, slots) for m, (_, slots) in zip(masters, plan.targets, strict=True)]
    update_own(rule, own, gradients, scalars, limits, plan.groups)
    for master, (var, _), rest in zip(masters, plan.targets, plan.remainders, strict=True):
        var[...], rest[...] = split(master)


def update_split_rows(
    rule: UpdateRule,
    other_rows: UpdateRule | None,
    plan: SplitPlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
    first: int,
) -> None:
    """Updates the rows of a table that have a gradient, and others by `other_rows` if given.

    `first` is that of `group_rows`.
    """
    [(var, slots)], [rest] = plan.targets, plan.remainders
    values = values.astype(np.float32)
    groups = group_rows(rows, first)
    sums, order = quietly(lambda: sum_rows(values, groups))
    rows = groups.rows[order]
    master = joined(var[rows], rest[rows])
    touched = [slot[rows] for slot in slots]
    if other_rows is not None:
        of_others = [other_rows.own(scalars)]
        if not update_mixed(other_rows, plan, None, of_others, limits):
            zero = np.zeros(var.shape, np.float32)
            update_split(other_rows, plan, [zero], of_others, limits)
    update_own(rule, [Target(master, touched)], [sums], [scalars], limits, rows=rows)
    var[rows], rest[rows] = split(master)
    for slot, new_rows in zip(slots, touched, strict=True):
        slot[rows] = new_rows
