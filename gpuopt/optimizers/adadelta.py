"""Adadelta."""

from __future__ import annotations

from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer, update_rule


@update_rule(squares=("accum", "accum_update"))
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
        learning_rate: Annotated[Hyperparameter, "Scales the paper's step."] = 0.001,
        rho: Annotated[Hyperparameter, "Decay of both averages."] = 0.95,
        epsilon: Annotated[
            Hyperparameter, "Added inside both roots; the first steps have about its root's size."
        ] = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            rho=rho,
            epsilon=epsilon,
        )
