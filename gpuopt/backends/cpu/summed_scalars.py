"""Sums over whole variables in host memory, for the rules that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.chunks import Chunks
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import scratch
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.threads import share_out
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]


def scalars_with_sums(
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
            sums += _added(rule.terms(values, rule.gradient(grad, scalars), *others, **scalars))
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
        part = rule.gradient(part, scalars, Numbers(first, part.size, of_variable=own_number))
        var, *slots = codecs.decode(stored, scratch([real] * codecs.num_decoded, stored[0].size))
        sums += _added(rule.terms(var, part, *slots, **scalars))
    return sums


def _added(terms: Sequence[Array]) -> list[np.float64]:
    return [np.sum(each, dtype=np.float64) for each in terms]
