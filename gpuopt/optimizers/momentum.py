"""Momentum, plain and Nesterov's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer
from gpuopt.update_rule import update_rule


@update_rule
def momentum(var: Any, grad: Any, momentum: Any, *, learning_rate: Any, decay: Any) -> None:
    momentum *= decay
    momentum += grad
    var -= learning_rate * momentum


@update_rule
def nesterov_momentum(
    var: Any, grad: Any, momentum: Any, *, learning_rate: Any, decay: Any
) -> None:
    momentum *= decay
    momentum += grad
    var -= learning_rate * (grad + decay * momentum)


class MomentumOptimizer(RuleOptimizer):
    """Gradient descent with momentum, in TensorFlow 1's form.

        a = momentum * a + g
        w -= learning_rate * a                          plain
        w -= learning_rate * (g + momentum * a)         Nesterov

    The learning rate is not part of the accumulator `a`, so changing it rescales the whole history.
    Polyak 1964; Nesterov's form as in Sutskever et al. 2013, section 2. A sparse gradient updates
    the rows it names; `a` does not decay elsewhere.
    """

    rule = momentum

    def __init__(
        self,
        learning_rate: Hyperparameter,
        momentum: Hyperparameter,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each number may be a function without arguments.

        Args:
            learning_rate: Step size.
            momentum: What remains of the accumulator after a step.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name, and its slots'.
            use_nesterov: Look ahead along the accumulator.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.
        """
        super().__init__(
            use_locking,
            name,
            on_nonfinite=on_nonfinite,
            learning_rate=learning_rate,
            decay=momentum,
        )
        if use_nesterov:
            self.rule = nesterov_momentum

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"momentum": 0.0}
