"""AddSign."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    CatchUpOption,
    Hyperparameter,
    Unnamed,
    update_rule,
)
from gpuopt.optimizers.base.sign_decay import SignDecayFunction, SignOptimizer


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

    Args:
        learning_rate: Step size.
        alpha: The factor of the gradient where the signs say nothing.
        beta: Decay of the gradient's average `m`.
        sign_decay_fn: Returns `decay` for the `global_step` that `apply_gradients` is given, before
            it is counted up: `get_linear_decay_fn(...)`, say. Called once in each step.
        use_locking, name, on_nonfinite: See `Optimizer`.
        catch_up: True updates rows lazily: a row without a gradient is brought up to date when it
            is next read or updated, to the numbers that the steps in between would have given it.
            "stepping" repeats these steps one by one. Tables must be variables that own their
            memory.
        groups: See `ParameterGroup`.
        clip_norm, clip_value, clip_form: See `RuleOptimizer`.

    Raises:
        TypeError: `sign_decay_fn` is no function.
    """

    rule = add_sign
    # Where the gradient is 0, the variable stays.
    rule_of_other_rows = add_sign

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.1,
        alpha: Hyperparameter = 1.0,
        beta: Hyperparameter = 0.9,
        sign_decay_fn: SignDecayFunction | None = None,
        use_locking: bool = False,
        name: str = "AddSignOptimizer",
        *,
        catch_up: CatchUpOption = False,
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
