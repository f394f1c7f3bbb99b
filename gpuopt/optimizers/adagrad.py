"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer, require_positive
from gpuopt.update_rule import update_rule


@update_rule
def adagrad(var: Any, grad: Any, accumulator: Any, *, learning_rate: Any) -> None:
    accumulator += grad * grad
    var -= learning_rate * grad / np.sqrt(accumulator)


class AdagradOptimizer(RuleOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011, section 1.3).

        n += g^2
        w -= learning_rate * g / sqrt(n)

    There is no epsilon: `n` starts above zero instead. A sparse gradient updates the rows it names.
    """

    rule = adagrad

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; the learning rate may be a function without arguments.

        Args:
            learning_rate: Step size.
            initial_accumulator_value: What `n` starts with, above 0.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name, and its slots'.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.

        Raises:
            ValueError: `initial_accumulator_value` is not positive.
        """
        require_positive(initial_accumulator_value=initial_accumulator_value)
        super().__init__(use_locking, name, on_nonfinite=on_nonfinite, learning_rate=learning_rate)
        self._initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self._initial_accumulator_value}
