"""Proximal Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer, require_positive
from gpuopt.update_rule import update_rule


@update_rule
def proximal_adagrad(
    var: Any, grad: Any, accumulator: Any, *, learning_rate: Any, l1: Any, l2: Any
) -> None:
    accumulator += grad * grad
    step_size = learning_rate / np.sqrt(accumulator)
    var -= step_size * grad
    threshold = step_size * l1
    var -= np.clip(var, -threshold, threshold)
    var /= 1 + l2 * step_size


class ProximalAdagradOptimizer(RuleOptimizer):
    """Forward-backward splitting (Duchi & Singer 2009) with Adagrad's step sizes.

        n += g^2,  e = learning_rate / sqrt(n)
        w = soft_threshold(w - e * g, e * l1) / (1 + l2 * e)

    A sparse gradient updates the rows it names.
    """

    rule = proximal_adagrad

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: Hyperparameter = 0.0,
        l2_regularization_strength: Hyperparameter = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each number but the second may be a function.

        Args:
            learning_rate: Step size.
            initial_accumulator_value: What `n` starts with, above 0.
            l1_regularization_strength: Makes weights exactly 0.
            l2_regularization_strength: Makes weights small.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name, and its slots'.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.

        Raises:
            ValueError: `initial_accumulator_value` is not positive.
        """
        require_positive(initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            use_locking,
            name,
            on_nonfinite=on_nonfinite,
            learning_rate=learning_rate,
            l1=l1_regularization_strength,
            l2=l2_regularization_strength,
        )
        self._initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self._initial_accumulator_value}
