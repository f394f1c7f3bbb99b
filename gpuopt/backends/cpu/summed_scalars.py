"""Sums over whole variables in host memory, for the rules that need them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.limits import CpuLimits
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
        given = rule, plan.targets[position], gradients[position], each[position]
        each[position] = {**each[position], **_sums(*given)}

    threads = 1 if plan.size < limits.large_elements else limits.threads_for(plan.size)
    share_out(add_sums, range(len(each)), threads)
    return each


def _sums(
    rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars
) -> dict[str, np.floating[Any]]:
    """Returns the sums over one variable, added up in one order and in float64."""
    assert rule.terms is not None, "it has sums"
    var, slots = target
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
    add = partial(np.sum, dtype=np.float64)
    with chunks:
        for chunk in chunks:
            sums += list(map(add, rule.terms(*chunk, **scalars)))
    return {name: real(value) for name, value in zip(rule.sums, sums, strict=True)}
