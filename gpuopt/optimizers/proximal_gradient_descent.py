"""Proximal gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer, update_rule


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
    hyperparameter_of: ClassVar[Mapping[str, str]] = {
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
    }

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        l1_regularization_strength: Annotated[Hyperparameter, "Makes weights exactly 0."] = 0.0,
        l2_regularization_strength: Annotated[Hyperparameter, "Makes weights small."] = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
