"""Dense updates in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.rule_form import RuleForm, quickest_forms
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.master_copies import write_copies
from gpuopt.backends.cpu.mixed_update import update_mixed
from gpuopt.backends.cpu.row_wise_update import update_rows
from gpuopt.backends.cpu.summed_scalars import scalars_with_sums
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

_READWRITE: list[list[Literal["readwrite"]]] = [["readwrite"]]


def update_dense(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`."""
    if rule.sums:
        scalars = scalars_with_sums(rule, plan, gradients, scalars, limits)
        plan = plan.alone
    forms: Sequence[RuleForm]
    if plan.size < limits.compiled_elements:
        threads, forms = 1, [PlainRule(rule, each) for each in scalars]
    else:
        is_large = plan.size >= limits.large_elements
        threads = limits.threads_for(plan.size) if is_large else 1
        forms = quickest_forms(rule, plan.real, scalars, is_large)
        plan = plan.for_forms(forms)
    if plan.read_late:
        gradients = plan.without_overlap(gradients)
    if rule.row_slots:
        gradients = plan.in_rows(gradients)
    tasks, strided = plan.tasks(forms, gradients, threads)
    if threads == 1:
        for task in tasks:
            task()
    else:
        share_out(lambda task: task(), tasks, threads)
    for position in strided:
        of_group = scalars[plan.groups[position]]
        if rule.row_slots:
            update_strided_rows(rule, plan.targets[position], gradients[position], of_group, limits)
        else:
            update_strided(rule, plan.targets[position], gradients[position], of_group)


def update_alone(
    rule: UpdateRule,
    targets: Sequence[Target],
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
    groups: Sequence[int] | None = None,
) -> None:
    """Applies a rule to variables without a plan, as copies that exist during one step are."""
    memory = WrittenMemory([array for var, slots in targets for array in (var, *slots)])
    update_dense(rule, DensePlan(targets, memory, limits, groups), gradients, scalars, limits)


def update_strided_rows(
    rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars, limits: CpuLimits
) -> None:
    """Updates a variable of any strides by a row-wise rule."""
    if target.var.size:
        # A scalar is one row.
        written = [np.atleast_1d(array) for array in (target.var, *target.slots)]
        update_rows(rule, written, None, np.atleast_1d(gradient), scalars, limits)


def update_with_zero(
    rule: UpdateRule, plan: DensePlan, scalars: Scalars, limits: CpuLimits
) -> None:
    """Updates a plan's only variable, and its copy, as if its gradient were zero everywhere."""
    if plan.is_mixed and update_mixed(rule, plan, None, [scalars], limits):
        return
    [target] = plan.targets
    var = target.var
    threads = limits.threads_for(var.size)
    real = np.dtype(compute_type(var.dtype))
    if var.size < limits.compiled_elements or not plan.is_large:
        update_strided(rule, target, np.broadcast_to(var.dtype.type(0), var.shape), scalars)
    else:
        is_large = var.size >= limits.large_elements
        forms = quickest_forms(rule, real, [scalars], is_large, zero_grad=True)
        tasks = plan.tasks_without_gradients(forms, threads)
        share_out(lambda task: task(), tasks, threads)
    if plan.copies:
        write_copies(plan, limits)


def update_strided(rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars) -> None:
    """Updates a variable of any strides, in flat chunks of the compute type.

    nditer copies a chunk in and out only where the storage is of another type or not contiguous.
    """
    var, slots = target
    real = compute_type(var.dtype)
    chunks = np.nditer(
        [var, gradient, *slots],
        flags=["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"],
        op_flags=[["readwrite"], ["readonly"], *_READWRITE * len(slots)],
        op_dtypes=[real] * (2 + len(slots)),
        casting="unsafe",
        buffersize=PlainRule.most_elements,
    )
    with chunks:
        for chunk in chunks:
            rule.apply(*chunk, **scalars)
