"""Gradient descent."""

from __future__ import annotations

from typing import Any

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer
from gpuopt.update_rule import update_rule


@update_rule
def gradient_descent(var: Any, grad: Any, *, learning_rate: Any) -> None:
    var -= learning_rate * grad


class GradientDescentOptimizer(RuleOptimizer):
    """Gradient descent: `w -= learning_rate * g`.

    A sparse gradient updates the rows it names. TensorFlow subtracts repeated rows one by one; here
    they are summed first, which differs in rounding alone.
    """

    rule = gradient_descent

    def __init__(
        self,
        learning_rate: Hyperparameter,
        use_locking: bool = False,
        name: str = "GradientDescent",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each may be a function without arguments.

        Args:
            learning_rate: Step size.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.
        """
        super().__init__(use_locking, name, on_nonfinite=on_nonfinite, learning_rate=learning_rate)
