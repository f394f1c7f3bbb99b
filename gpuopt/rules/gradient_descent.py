"""The rule of gradient descent, by which rows are also added to an array."""

from __future__ import annotations

from typing import Any

from gpuopt.rules.update_rule import update_rule


@update_rule
def gradient_descent(var: Any, grad: Any, *, learning_rate: Any) -> None:
    """Subtracts the gradient, times a number."""
    var -= learning_rate * grad
