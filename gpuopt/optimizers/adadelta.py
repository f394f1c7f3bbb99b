"""Adadelta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer
from gpuopt.update_rule import update_rule


@update_rule
def adadelta(
    var: Any,
    grad: Any,
    accum: Any,
    accum_update: Any,
    *,
    learning_rate: Any,
    rho: Any,
    epsilon: Any,
) -> None:
    accum *= rho
    accum += (1 - rho) * (grad * grad)
    update = np.sqrt(accum_update + epsilon) / np.sqrt(accum + epsilon) * grad
    accum_update *= rho
    accum_update += (1 - rho) * (update * update)
    var -= learning_rate * update


class AdadeltaOptimizer(RuleOptimizer):
    """Adadelta (Zeiler 2012, algorithm 1), with a learning rate after it.

        A = rho * A + (1 - rho) * g^2
        u = sqrt(U + epsilon) / sqrt(A + epsilon) * g
        U = rho * U + (1 - rho) * u^2
        w -= learning_rate * u

    The paper's step is `learning_rate=1`. A sparse gradient updates the rows it names; the averages
    `A` and `U` do not decay elsewhere.
    """

    rule = adadelta

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        rho: Hyperparameter = 0.95,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each may be a function without arguments.

        Args:
            learning_rate: Scales the paper's step.
            rho: Decay of both averages.
            epsilon: Added inside both roots; the first steps have about its root's size.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name, and its slots'.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.
        """
        super().__init__(
            use_locking,
            name,
            on_nonfinite=on_nonfinite,
            learning_rate=learning_rate,
            rho=rho,
            epsilon=epsilon,
        )

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accum": 0.0, "accum_update": 0.0}
