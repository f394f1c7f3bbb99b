"""Gradient descent."""

from __future__ import annotations

from typing import Unpack

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer
from gpuopt.rules.gradient_descent import gradient_descent


class GradientDescentOptimizer(RuleOptimizer):
    """Gradient descent: `w -= learning_rate * g`.

    A sparse gradient updates the rows it names. TensorFlow subtracts repeated rows one by one; here
    they are summed first, which differs in rounding alone.

    Args:
        learning_rate: Step size.
        use_locking, name, on_nonfinite: See `Optimizer`.
        groups: See `ParameterGroup`.
        clip_norm, clip_value, clip_form: See `RuleOptimizer`.
    """

    rule = gradient_descent

    def __init__(
        self,
        learning_rate: Hyperparameter,
        use_locking: bool = False,
        name: str = "GradientDescent",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common}, learning_rate=learning_rate
        )
