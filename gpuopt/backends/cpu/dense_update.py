"""Dense updates in host memory, after the sums over whole variables that some rules need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.chunks import Chunks
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.rule_form import RuleForm, quickest_forms
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import WrittenMemory, scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.tiles import Rounding
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

_READWRITE: list[list[Literal["readwrite"]]] = [["readwrite"]]


def update_dense(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array] | None,
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Applies a rule to every element of a plan's variables; see `Backend.apply_dense`.

    If `gradients` is None, they are zero everywhere; the rule then has no sums.
    """
    if rule.sums:
        assert gradients is not None, "a rule with sums has no update without a gradient"
        scalars = _scalars_with_sums(rule, plan, gradients, scalars, limits)
        plan = plan.alone
    is_large = plan.size >= limits.large_elements
    threads = limits.threads_for(plan.size) if is_large else 1
    if gradients is not None and plan.strided:
        gradients = plan.without_overlap(gradients, plan.strided)
    compiled = plan.compiled(rule, gradients) if plan.is_compiled(rule, plan.size) else None
    if compiled is not None:
        compiled.update(gradients, scalars, threads)
    else:
        ignore_fp_warnings(_update_by_tasks, rule, plan, gradients, scalars, limits, threads)
    if plan.strided:
        ignore_fp_warnings(_update_each_strided, rule, plan, gradients, scalars, limits)


def _update_by_tasks(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array] | None,
    scalars: Sequence[Scalars],
    limits: CpuLimits,
    threads: int,
) -> None:
    """Updates the variables that are not `strided`, where no `CompiledUpdate` does."""
    is_plain = plan.size < limits.compiled_elements
    if gradients is None and (is_plain or not plan.is_large):
        zero = plan.real.type(0)
        gradients = [np.broadcast_to(zero, var.shape) for var, *_ in plan.targets]
    forms: Sequence[RuleForm]
    if is_plain:
        forms = [PlainRule(rule, each) for each in scalars]
    else:
        is_large = plan.size >= limits.large_elements
        forms = quickest_forms(rule, plan.real, scalars, is_large, zero_grad=gradients is None)
    if rule.is_numbered:
        plan = plan.apart
    rounding = None
    if rule.is_rounded:
        rounding = [Rounding(rule.is_averaged, each) for each in scalars]
    if gradients is not None and plan.read_late:
        gradients = plan.flat(plan.without_overlap(gradients, plan.read_late))
    tasks = plan.tasks(forms, gradients, threads, rounding)
    if threads == 1:
        for task in tasks:
            task()
    else:
        share_out(lambda task: task(), tasks, threads)


def _update_each_strided(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array] | None,
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    zero = plan.real.type(0)
    for position in plan.strided:
        of_group, var = scalars[plan.groups[position]], plan.targets[position].var
        gradient = np.broadcast_to(zero, var.shape) if gradients is None else gradients[position]
        if plan.codecs.are_casts and not (rule.is_numbered or rule.row_slots):
            _update_strided(rule, plan.targets[position], gradient, of_group)
        else:
            _update_copies(rule, plan, position, gradient, [of_group], limits)


def _update_strided(rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars) -> None:
    """Updates a variable of any strides and types, in flat chunks of the compute type.

    nditer copies a chunk in and out only where the storage is of another type or not contiguous.
    """
    var, slots, *_ = target
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
            values, grad, *others = chunk
            rule.apply(values, rule.gradient(grad, others, scalars), *others, **scalars)


def _update_copies(
    rule: UpdateRule,
    plan: DensePlan,
    position: int,
    gradient: Array,
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> None:
    """Updates contiguous copies of a variable's strided arrays, and copies the results back."""
    given = plan.targets[position]
    written, count = given.arrays, len(given.slots)
    flat = [np.require(array, requirements=["C", "ALIGNED"]) for array in written]
    new_var, *others = flat
    companion = None if given.companion is None else others[count]
    target = Target(new_var, others[:count], companion, given.first_number)
    own = DensePlan([target], WrittenMemory(flat), limits, None, plan.codecs)
    update_dense(rule, own, [gradient], scalars, limits)
    for array, new in zip(written, flat, strict=True):
        if new is not array:
            array[...] = new


def _scalars_with_sums(
    rule: UpdateRule,
    plan: DensePlan,
    gradients: Sequence[Array],
    scalars: Sequence[Scalars],
    limits: CpuLimits,
) -> list[Scalars]:
    """Returns the scalars of each variable: those of its group, with its own sums."""
    each: list[Scalars] = [scalars[group] for group in plan.groups]

    def add_sums(position: int) -> None:
        scalars, gradient = each[position], gradients[position]
        if plan.codecs.are_casts and not rule.reads_numbers:
            sums = _sums(rule, plan.targets[position], gradient, scalars)
        else:
            sums = _sums_of_decoded(rule, plan, position, gradient, scalars)
        each[position] = {**scalars, **dict(zip(rule.sums, sums.astype(plan.real), strict=True))}

    threads = 1 if plan.size < limits.large_elements else limits.threads_for(plan.size)
    share_out(add_sums, range(len(each)), threads)
    return each


def _sums(rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars) -> Array:
    """Returns the sums over one variable, added up in one order and in float64."""
    assert rule.terms is not None, "it has sums"
    var, slots, *_ = target
    real = compute_type(var.dtype)
    chunks = np.nditer(
        [var, gradient, *slots],
        flags=["external_loop", "buffered", "zerosize_ok"],
        op_flags=[["readonly"]] * (2 + len(slots)),
        op_dtypes=[real] * (2 + len(slots)),
        casting="unsafe",
        buffersize=PlainRule.most_elements,
    )
    sums = np.zeros(len(rule.sums))
    with chunks:
        for chunk in chunks:
            values, grad, *others = chunk
            grad = rule.gradient(grad, others, scalars, is_read_only=True)
            sums += _added(rule.terms(values, grad, *others, **scalars))
    return sums


def _sums_of_decoded(
    rule: UpdateRule, plan: DensePlan, position: int, gradient: Array, scalars: Scalars
) -> Array:
    """Does what `_sums` does, for arrays of any codecs."""
    assert rule.terms is not None, "it has sums"
    sums, real, codecs = np.zeros(len(rule.sums)), plan.real, plan.codecs
    arrays = [np.require(each, requirements=["C", "ALIGNED"]) for each in plan.arrays[position]]
    if not arrays[0].size:
        return sums
    grad = np.require(gradient, requirements=["C", "ALIGNED"]).reshape(-1)
    most, own_number = PlainRule.most_elements, plan.targets[position].first_number
    chunks = Chunks([arrays], [0], most, per_block=codecs.per_block)
    for number in range(len(chunks)):
        stored, part, first = chunks.part(number, [grad])
        assert part is not None
        part = part.astype(real, copy=False)
        var, *slots = codecs.decode(stored, scratch([real] * codecs.num_decoded, stored[0].size))
        numbers = Numbers(first, part.size, of_variable=own_number)
        part = rule.gradient(part, slots, scalars, numbers, is_read_only=True)
        sums += _added(rule.terms(var, part, *slots, **scalars))
    return sums


def _added(terms: Sequence[Array]) -> list[np.float64]:
    return [np.sum(each, dtype=np.float64) for each in terms]
