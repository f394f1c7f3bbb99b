"""Scalars of optimizers that count the steps of each variable, as torch does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.counts import StepCount
from gpuopt.step.step import ThisThread

Result = TypeVar("Result")
Scalars = Mapping[str, "np.floating[Any]"]


class _Optimizer(Protocol):
    """The part of a `RuleOptimizer` that these functions use."""

    rule: UpdateRule
    this_thread: ThisThread

    def _scalars(self, real: type[np.floating[Any]]) -> Scalars: ...

    def _in_group(self, number: int, compute: Callable[[], Result]) -> Result: ...


def scalars_by_count(optimizer: _Optimizer, real: type[np.floating[Any]]) -> dict[int, Scalars]:
    """Returns the rule's scalars for each count of the step, by the counts' numbers."""
    this_thread = optimizer.this_thread
    found: dict[int, Scalars] = this_thread.scalars.setdefault(real, {})
    for count in this_thread.counted:
        if count.number not in found:
            compute = partial(in_count, optimizer, count, partial(optimizer._scalars, real))
            computed = dict.fromkeys(optimizer.rule.computed, real(0))
            found[count.number] = {**ignore_fp_warnings(compute), **computed}
    return found


def in_count(optimizer: _Optimizer, count: StepCount, compute: Callable[[], Result]) -> Result:
    """Calls a function that sees a count, and the hyperparameters of its variables."""
    this_thread = vars(optimizer.this_thread)
    outer = this_thread["count"]
    try:
        this_thread["count"] = count
        return optimizer._in_group(count.group, compute)
    finally:
        this_thread["count"] = outer
