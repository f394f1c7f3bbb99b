"""FTRL-Proximal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    Range,
    RuleOptimizer,
    check_numbers,
    update_rule,
)

# Keeps beta / learning_rate finite at a learning rate of 0, as TensorFlow does.
_SMALLEST_LEARNING_RATE = np.float32(1e-36)
# Lost in the rounding of any sum above 1e-21, in float64 too.
_SMALLEST_NUMBER = np.finfo(np.float32).tiny


@update_rule(squares=("accum",))
def ftrl(
    var: Any,
    grad: Any,
    accum: Any,
    linear: Any,
    *,
    learning_rate: Any,
    power: Any,
    l1: Any,
    l2: Any,
    l2_shrinkage: Any,
) -> None:
    shrunk = grad + 2 * l2_shrinkage * var
    new_accum = accum + grad * grad
    new_power = _to_power(new_accum, power)
    linear += shrunk - (new_power - _to_power(accum, power)) / learning_rate * var
    accum[...] = new_accum
    # Within the threshold this is 0 / denominator, which must stay 0 where the denominator is 0.
    denominator = new_power / learning_rate + (2 * l2 + _SMALLEST_NUMBER)
    var[...] = (np.clip(linear, -l1, l1) - linear) / denominator


def _to_power(accum: Any, power: Any) -> Any:
    return np.sqrt(accum) if power == 0.5 else accum**power


class FtrlOptimizer(RuleOptimizer):
    """FTRL-Proximal (McMahan et al. 2013, algorithm 1), with TensorFlow's generalisations.

        n' = n + g^2,  p = -learning_rate_power
        z += g + 2 * l2_shrinkage * w - (n'^p - n^p) / learning_rate * w
        w = 0                                                             where |z| <= l1
        w = (l1 * sign(z) - z) / (n'^p / learning_rate + 2 * l2')         elsewhere
        l2' = l2 + beta / (2 * learning_rate)

    The weights are rebuilt from `z`: a zero gradient on the first step sets them to 0. A sparse
    gradient rebuilds the rows it names. Where `n'` and `l2'` are 0, TensorFlow's sparse form gives
    NaN and its dense form 0; here both give 0.
    """

    rule = ftrl

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        learning_rate_power: Annotated[
            Hyperparameter, Range(high=0), "How fast the learning rate falls with `n`."
        ] = -0.5,
        initial_accumulator_value: Annotated[float, Range(0), "What `n` starts with."] = 0.1,
        l1_regularization_strength: Annotated[
            Hyperparameter, Range(0), "Makes weights exactly 0."
        ] = 0.0,
        l2_regularization_strength: Annotated[
            Hyperparameter, Range(0), "Stabilises, towards 0."
        ] = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: Annotated[str | None, "The last part of the names of the slots of `n`."] = None,
        linear_name: Annotated[
            str | None, "The last part of the names of the slots of `z`."
        ] = None,
        l2_shrinkage_regularization_strength: Annotated[
            Hyperparameter, Range(0), "An L2 penalty on the loss."
        ] = 0.0,
        beta: Annotated[Hyperparameter | None, "The paper's beta, 0 if None."] = None,
        **common: Unpack[Additions],
    ) -> None:
        check_numbers(type(self), initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            learning_rate_power=learning_rate_power,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=0.0 if beta is None else beta,
        )
        self.initial_accumulator_value = initial_accumulator_value
        self._op_names = {"accum": accum_name or name, "linear": linear_name or name}

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accum": self.initial_accumulator_value, "linear": 0.0}

    def _slot_op_name(self, slot_name: str) -> str:
        # A subclass may have slots of its own.
        return self._op_names.get(slot_name, self._name)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate = self._hyper("learning_rate")
        # In the hyperparameters' own type, before they are converted, as TensorFlow does.
        l2 = self._hyper("l2_regularization_strength") + self._hyper("beta") / (
            2 * max(learning_rate, _SMALLEST_LEARNING_RATE)
        )
        return {
            "learning_rate": real(learning_rate),
            "power": -real(self._hyper("learning_rate_power")),
            "l1": real(self._hyper("l1_regularization_strength")),
            "l2": real(l2),
            "l2_shrinkage": real(self._hyper("l2_shrinkage_regularization_strength")),
        }
