"""StepWrapper: an optimizer that adds something to the steps of another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

import numpy as np

from gpuopt.distributed.wrapper import OptimizerWrapper, check_optimizer
from gpuopt.optimizer import Optimizer
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.ledger import Ledger
from gpuopt.step.replica_context import replica_context
from gpuopt.step.request import StepRequest, make_step, pass_on
from gpuopt.step.updates import Updates
from gpuopt.variables.variable import Variable


class StepWrapper(OptimizerWrapper):
    """Base of the wrappers whose work is part of each step of the optimizer inside.

    The step calls this wrapper: so what it adds is seen by a save with the step or not at all, and
    there is none of it in a step that is refused or skipped. A subclass overrides
    `_prepare_updates`, `_before_update` or `_after_update`; see `Addition`.

    The optimizer inside may be a wrapper, too. One of a user's own must leave the step to
    `Optimizer.apply_gradients`, in the call of its own `apply_gradients`.
    """

    def __init__(self, opt: Optimizer, use_locking: bool = False, name: str | None = None) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the steps; its state is this optimizer's.
            use_locking: See `Optimizer`.
            name: This optimizer's; that of `opt` if not given.

        Raises:
            TypeError: `opt` is no optimizer.
        """
        # First, as another thread may save as soon as this optimizer is listed among the living.
        self._optimizer = check_optimizer(opt)
        self._has_own_name = name is not None
        super().__init__(use_locking, type(self).__name__ if name is None else name)

    @property
    def _inner(self) -> Optimizer:
        return self._optimizer

    def get_name(self) -> str:
        return super().get_name() if self._has_own_name else self._inner.get_name()

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Has the optimizer inside make its step, and adds to it; see `Optimizer.apply_gradients`.

        Args:
            grads_and_vars: See `Optimizer.apply_gradients`.
            global_step: Likewise.
            name: Likewise.
            skip_gradients_aggregation: Likewise.
        """
        request = StepRequest(grads_and_vars, global_step, name, skip_gradients_aggregation)
        make_step(self, request)

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        pass_on(self._inner, request._replace(additions=(self, *request.additions)))

    def _variables_beside(self, variables: Sequence[Variable]) -> list[Variable]:
        """Returns what the wrapper keeps beside variables; makes what is missing.

        Args:
            variables: Those that the optimizer inside updates on this worker, or on another one.
        """
        return []

    # What the step calls: see `Addition`.

    @property
    def _what_is_added(self) -> str:
        return ""

    @property
    def _keeps_new_slots(self) -> bool:
        return False

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        return updates, nothing_to_forget

    def _makes_step(self, updates: Updates) -> bool:
        return True

    def _written_beside(self, variables: Sequence[Variable]) -> Iterable[Variable]:
        return ()

    def _accept_decided(self, is_counted: bool) -> None:
        pass

    def _before_update(self, updates: Updates, ledger: Ledger) -> None:
        pass

    def _after_update(self, updates: Updates, ledger: Ledger) -> None:
        pass


def refuse_replicas(optimizer: Optimizer) -> None:
    """Raises RuntimeError in a replica of a strategy, and in a tower."""
    context = replica_context()
    if context.strategy is not None or context.num_replicas > 1:
        raise RuntimeError(
            f'"{optimizer.get_name()}" is for workers that step by themselves; it cannot be used '
            "in a replica of a strategy, or in a tower"
        )


def checked_number(name: str, value: Any) -> float:
    """Returns a number, or raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def at_least_1(name: str, value: Any) -> int:
    """Returns an integer from 1.

    Raises:
        TypeError: `value` is no integer.
        ValueError: it is less.
    """
    try:
        number = index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer, got {value!r}") from error
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}")
    return number
