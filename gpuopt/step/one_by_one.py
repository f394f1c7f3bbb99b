"""GATE_NONE: each variable is updated as soon as its gradient is final."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

from gpuopt.autodiff.engine import Loss
from gpuopt.step.loss import gradients_of, refuse_independent_loss
from gpuopt.step.overlap import refuse_shared_memory
from gpuopt.step.request import StepRequest
from gpuopt.step.step import Step
from gpuopt.step.updates import HookOptimizer, Updates, dtypes_of
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable


class UpdatingOptimizer(HookOptimizer, Protocol):
    """The part of an optimizer that `update_one_by_one` uses."""

    def _checked_updates(self, request: StepRequest) -> Updates: ...


def update_one_by_one(
    optimizer: UpdatingOptimizer,
    step: Step,
    request: StepRequest,
    loss: Loss,
    var_list: Any,
    grad_loss: Any,
) -> None:
    """Computes gradients, and updates each variable in the middle of that; a whole step.

    Args:
        optimizer: What updates.
        step: The step, which has not begun.
        request: Its request, but for the pairs.
        loss: As in `Optimizer.compute_gradients`.
        var_list: Likewise.
        grad_loss: Likewise.

    Raises:
        ValueError: no variable has a gradient, or memory would be updated twice.
    """
    slots_of = optimizer.state.slots_of
    updated: list[Variable] = []
    written: set[Identity] = set()
    is_owned = True

    def compute(apply: Callable[[Updates], None]) -> None:
        def update(gradient: Any, variable: Variable) -> None:
            nonlocal is_owned
            updated.append(variable)
            identities = {each.identity for each in (variable, *slots_of(variable))}
            # A comparison with all variables each time would take longer than the updates.
            if not (written.isdisjoint(identities) and variable.owns_memory and is_owned):
                is_owned = False
                refuse_shared_memory(updated, list(chain.from_iterable(map(slots_of, updated))))
            written.update(identities)
            apply(optimizer._checked_updates(request._replace(pairs=[(gradient, variable)])))

        dtypes = dtypes_of(optimizer)
        grads_and_vars = gradients_of(loss, var_list, grad_loss, dtypes, update)
        if not updated:
            refuse_independent_loss(loss, [variable for _, variable in grads_and_vars])

    step.run_in_parts(compute)
