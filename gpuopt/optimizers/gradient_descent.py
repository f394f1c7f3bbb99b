"""Gradient descent."""

from __future__ import annotations

from typing import Annotated, Any, Unpack

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer, update_rule


@update_rule
def gradient_descent(var: Any, grad: Any, *, learning_rate: Any) -> None:
    """Subtracts the gradient, times a number."""
    var -= learning_rate * grad


class GradientDescentOptimizer(RuleOptimizer):
    """Gradient descent: `w -= learning_rate * g`.

    A sparse gradient updates the rows it names. TensorFlow subtracts repeated rows one by one; here
    they are summed first, which differs in rounding alone.
    """

    rule = gradient_descent

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        use_locking: bool = False,
        name: str = "GradientDescent",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common}, learning_rate=learning_rate
        )
