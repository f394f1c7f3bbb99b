"""PowerSign."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    CatchUpOption,
    Hyperparameter,
    Unnamed,
    require_positive,
    update_rule,
)
from gpuopt.optimizers.base.hyperparameters import with_all_digits
from gpuopt.optimizers.base.sign_decay import SignDecayFunction, SignOptimizer


@update_rule(unnamed=Unnamed({"m": "beta"}))
def power_sign(
    var: Any, grad: Any, m: Any, *, learning_rate: Any, exponent: Any, beta: Any
) -> None:
    m *= beta
    m += (1 - beta) * grad
    var -= learning_rate * np.exp(exponent * np.sign(grad) * np.sign(m)) * grad


class PowerSignOptimizer(SignOptimizer):
    """PowerSign (Bello et al. 2017): larger steps where gradient and average agree in sign.

        m = beta * m + (1 - beta) * g
        w -= learning_rate * base^(decay * sign(g) * sign(m)) * g

    `decay` is `sign_decay_fn(global_step)`, or 1. A sparse gradient moves `w` in the rows that it
    names; `m` decays in every row, as in TensorFlow. It is TensorFlow's
    `contrib.opt.PowerSignOptimizer`.

    Args:
        learning_rate: Step size.
        base: What the gradient is multiplied by where the signs agree, and divided by where they do
            not; above 0.
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
        ValueError: `base` is not positive.
    """

    rule = power_sign
    # Where the gradient is 0, the variable stays.
    rule_of_other_rows = power_sign

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.1,
        base: Hyperparameter = math.e,
        beta: Hyperparameter = 0.9,
        sign_decay_fn: SignDecayFunction | None = None,
        use_locking: bool = False,
        name: str = "PowerSignOptimizer",
        *,
        catch_up: CatchUpOption = False,
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            sign_decay_fn,
            learning_rate=learning_rate,
            base=base,
            beta=beta,
        )
        self._set_catch_up(catch_up)

    @classmethod
    def _checked(cls, name: str, value: Hyperparameter) -> Hyperparameter:
        if name != "base":
            return super()._checked(name, value)
        if not callable(value):
            require_positive(base=value)
        return with_all_digits(super()._checked(name, value))

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        base = self._hyper("base")
        require_positive(base=float(base))
        return {
            "learning_rate": real(self._hyper("learning_rate")),
            "exponent": real(np.float32(np.log(base))) * real(self._hyper("decay")),
            "beta": real(self._hyper("beta")),
        }

    def _sparse_scalars(
        self, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        # TensorFlow takes a power of e here, with e rounded to float32.
        real = type(scalars["exponent"])
        return {**scalars, "exponent": scalars["exponent"] * np.log(real(np.float32(math.e)))}
