"""PowerSign."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    AllDigits,
    CatchUpOption,
    Hyperparameter,
    Range,
    Unnamed,
    check_range,
    update_rule,
)
from gpuopt.optimizers.base.catching_up import CATCH_UP
from gpuopt.optimizers.base.sign_decay import SIGN_DECAY, SignDecayFunction, SignOptimizer


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

    Raises:
        TypeError: `sign_decay_fn` is no function.
    """

    rule = power_sign
    # Where the gradient is 0, the variable stays.
    rule_of_other_rows = power_sign

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.1,
        base: Annotated[
            Hyperparameter,
            Range(above=0),
            AllDigits,
            "What the gradient is multiplied by where the signs agree, and divided by where they "
            "do not.",
        ] = math.e,
        beta: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        sign_decay_fn: Annotated[SignDecayFunction | None, SIGN_DECAY] = None,
        use_locking: bool = False,
        name: str = "PowerSignOptimizer",
        *,
        catch_up: Annotated[CatchUpOption, CATCH_UP] = False,
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

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        base = self._hyper("base")
        check_range(type(self), "base", base)
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
