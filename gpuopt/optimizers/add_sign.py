"""AddSign."""

from __future__ import annotations

from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    CatchUpOption,
    Hyperparameter,
    Unnamed,
    update_rule,
)
from gpuopt.optimizers.base.catching_up import CATCH_UP
from gpuopt.optimizers.base.sign_decay import SIGN_DECAY, SignDecayFunction, SignOptimizer


@update_rule(unnamed=Unnamed({"m": "beta"}))
def add_sign(
    var: Any, grad: Any, m: Any, *, learning_rate: Any, alpha: Any, beta: Any, decay: Any
) -> None:
    m *= beta
    m += (1 - beta) * grad
    var -= learning_rate * (alpha + decay * np.sign(grad) * np.sign(m)) * grad


class AddSignOptimizer(SignOptimizer):
    """AddSign (Bello et al. 2017): larger steps where gradient and average agree in sign.

        m = beta * m + (1 - beta) * g
        w -= learning_rate * (alpha + decay * sign(g) * sign(m)) * g

    `decay` is `sign_decay_fn(global_step)`, or 1. A sparse gradient moves `w` in the rows that it
    names; `m` decays in every row, as in TensorFlow. It is TensorFlow's
    `contrib.opt.AddSignOptimizer`.

    Raises:
        TypeError: `sign_decay_fn` is no function.
    """

    rule = add_sign
    # Where the gradient is 0, the variable stays.
    rule_of_other_rows = add_sign

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.1,
        alpha: Annotated[
            Hyperparameter, "The factor of the gradient where the signs say nothing."
        ] = 1.0,
        beta: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        sign_decay_fn: Annotated[SignDecayFunction | None, SIGN_DECAY] = None,
        use_locking: bool = False,
        name: str = "AddSignOptimizer",
        *,
        catch_up: Annotated[CatchUpOption, CATCH_UP] = False,
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            sign_decay_fn,
            learning_rate=learning_rate,
            alpha=alpha,
            beta=beta,
        )
        self._set_catch_up(catch_up)
