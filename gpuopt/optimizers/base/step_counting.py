"""Optimizers that count their steps, as those of torch and optax do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gpuopt.optimizers.base.hyperparameters import Hyperparameter, with_all_digits
from gpuopt.optimizers.base.rule_optimizer import RuleOptimizer, undoable
from gpuopt.state.state import Range
from gpuopt.variables.variable import Variable

# As far as float64 counts.
_MOST_STEPS = 2.0**53


class StepCountingOptimizer(RuleOptimizer):
    """Base of the optimizers that TensorFlow 1 does not have, in the forms of torch and others.

    As those do in float64, they keep all digits of a Python float, which TensorFlow's optimizers
    round to float32. So they agree with them to the last digits, and a test can tell an epsilon in
    one place from an epsilon in another. A step's scalars are computed in float64, and rounded to
    the type that the rule computes in.

    Attributes:
        counters: What is shared by all variables beside the hyperparameters, float64, and what it
            starts with. `step` is the number of steps so far.
    """

    counters: ClassVar[Mapping[str, float]] = {"step": 0.0}

    def _all_hyperparameters(self, given: dict[str, Hyperparameter]) -> dict[str, Hyperparameter]:
        every = super()._all_hyperparameters(given)
        return {name: with_all_digits(value) for name, value in every.items()}

    def _all_non_slot_names(self) -> list[str]:
        return list(self.counters)

    def _state_ranges(self) -> Mapping[str, Range]:
        return {
            **super()._state_ranges(),
            **dict.fromkeys(self.counters, Range(-np.inf, np.inf, np.float64)),
            "step": Range(0.0, _MOST_STEPS, np.float64),
        }

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        for name, value in self.counters.items():
            if self._get_non_slot_variable(name) is None:
                first = min(var_list, key=lambda variable: variable.name)
                self.state.create_host_scalar(name, np.float64(value), first.device)
        super()._create_slots(var_list)

    def _counter(self, name: str) -> np.float64:
        return np.float64(self.state.host_scalar(name).numpy())

    def _step(self) -> np.float64:
        """Returns the number of the step that is being made, counted from 1."""
        return self._counter("step") + 1

    def _given(self, *names: str) -> list[np.float64]:
        """Returns hyperparameters of this step."""
        return [np.float64(self._hyper(name)) for name in names]

    def _bias_correction(self, beta: str, real: type[np.floating[Any]]) -> np.float64:
        """Returns the sum of the weights of an average's gradients in this step, `1 - beta^t`.

        The rule multiplies by `beta` as rounded to `real`, and so this takes the rounded one.
        """
        return 1 - np.float64(real(self._hyper(beta))) ** self._step()

    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        self.state.host_scalar("step").add(1)
