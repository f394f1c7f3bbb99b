"""A user's optimizers that update one variable at a time."""

from __future__ import annotations

from typing import Any

import gpuopt
from gpuopt import IndexedSlices, Variable


class ByHooks(gpuopt.Optimizer):
    """A user's: `w -= 0.5 * g`, with a dense hook and a sparse one."""

    def __init__(self, use_locking: bool = False, name: str = "ByHooks") -> None:
        super().__init__(use_locking, name)

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        var.assign_sub(0.5 * grad)

    def _apply_sparse(self, grad: IndexedSlices, var: Variable) -> None:
        var[grad.indices] -= 0.5 * grad.values


class RuleByHooks(gpuopt.GradientDescentOptimizer):
    """The same by a rule, called by hooks."""

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        super()._apply_dense(grad, var)
