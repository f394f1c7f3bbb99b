"""LAMB: Adam with a rate of its own for each variable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    DecayCommon,
    Hyperparameter,
    StepCountingOptimizer,
    update_rule,
)


def _lamb_terms(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    correction: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
    is_adapted: Any,
    **_: Any,
) -> Sequence[Any]:
    m = m + (1 - beta1) * (grad - m)
    v = v + (1 - beta2) * (grad * grad - v)
    update = correction * m / (np.sqrt(v) + epsilon) + weight_decay * var
    return is_adapted * var * var, update * update


@update_rule(
    squares=("v",),
    sums=("weights_squared", "update_squared"),
    terms=_lamb_terms,
)
def lamb(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    learning_rate: Any,
    correction: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight_decay: Any,
    is_adapted: Any,
    weights_squared: Any,
    update_squared: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    update = correction * m / (np.sqrt(v) + epsilon) + weight_decay * var
    if weights_squared > 0 and update_squared > 0:
        learning_rate = learning_rate * np.sqrt(weights_squared / update_squared)
    var -= learning_rate * update


class LAMBOptimizer(StepCountingOptimizer):
    """LAMB (You et al. 2020, algorithm 2), in Apex's form: a rate of its own for each variable.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        u = m' / (sqrt(v') + epsilon) + weight_decay * w
        m', v' = m / (1 - beta1^t), v / (1 - beta2^t)
        w -= learning_rate * |w| / |u| * u              w -= learning_rate * u if w or u is zero

    The norms are over a whole variable. It is Apex's `FusedLAMB`, with gradients that are averaged
    and decay in `u`. As there, a variable without decay takes the steps `w -= learning_rate * u`,
    unless `use_nvlamb` is True: `decay_variables="matrices"` leaves out biases and norms. Apex also
    scales all gradients to a global norm of 1, as `clip_norm=1.0, clip_form="apex"` does. optax's
    `lamb` has the ratio for all variables, as with `use_nvlamb`, and no decay by default.

    A sparse gradient makes the step of a dense one, whose other rows are zero: all rows of `m`, `v`
    and the weights change. It is summed in memory of the variable's size and type. Python floats
    keep all digits. `t` is the variable `step`, float64, shared by all variables.
    """

    rule = lamb

    def __init__(
        self,
        learning_rate: Annotated[
            Hyperparameter, "How far a variable moves, in units of its own norm."
        ] = 0.001,
        beta1: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the squared gradient's average `v`."] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-6,
        weight_decay: Annotated[Hyperparameter, "How much of the weights is in `u`."] = 0.01,
        use_nvlamb: Annotated[
            bool, "Whether variables without decay have the ratio of norms, too."
        ] = False,
        **common: Unpack[DecayCommon],
    ) -> None:
        super().__init__(
            common,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            weight_decay=weight_decay,
        )
        self._use_nvlamb = use_nvlamb

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        root = np.sqrt(self._bias_correction("beta2", real))
        learning_rate, epsilon, decay = self._given("learning_rate", "epsilon", "weight_decay")
        return {
            "learning_rate": real(learning_rate),
            "correction": real(root / self._bias_correction("beta1", real)),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(epsilon * root),
            "weight_decay": real(decay),
            "is_adapted": real(self._use_nvlamb or decay != 0),
        }

    def _scalars_of_variant(
        self, variant: int, scalars: Mapping[str, np.floating[Any]]
    ) -> Mapping[str, np.floating[Any]]:
        scalars = super()._scalars_of_variant(variant, scalars)
        return {**scalars, "is_adapted": scalars["is_adapted"].dtype.type(self._use_nvlamb)}
