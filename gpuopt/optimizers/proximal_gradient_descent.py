"""Proximal gradient descent."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer
from gpuopt.update_rule import update_rule


@update_rule
def proximal_gradient_descent(var: Any, grad: Any, *, learning_rate: Any, l1: Any, l2: Any) -> None:
    var -= learning_rate * grad
    threshold = learning_rate * l1
    var -= np.clip(var, -threshold, threshold)
    var /= 1 + l2 * learning_rate


class ProximalGradientDescentOptimizer(RuleOptimizer):
    """Forward-backward splitting (Duchi & Singer 2009, section 2).

        u = w - learning_rate * g
        w = soft_threshold(u, learning_rate * l1) / (1 + l2 * learning_rate)

    Unlike gradient descent, a zero gradient still shrinks the weights. A sparse gradient updates
    the rows it names.
    """

    rule = proximal_gradient_descent

    def __init__(
        self,
        learning_rate: Hyperparameter,
        l1_regularization_strength: Hyperparameter = 0.0,
        l2_regularization_strength: Hyperparameter = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each may be a function without arguments.

        Args:
            learning_rate: Step size.
            l1_regularization_strength: Makes weights exactly 0.
            l2_regularization_strength: Makes weights small.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.
        """
        super().__init__(
            use_locking,
            name,
            on_nonfinite=on_nonfinite,
            learning_rate=learning_rate,
            l1=l1_regularization_strength,
            l2=l2_regularization_strength,
        )
