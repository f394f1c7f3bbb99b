"""Adam with one second moment for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    DecayCommon,
    Hyperparameter,
    StepCountingOptimizer,
    update_rule,
)
from gpuopt.optimizers.base.weight_decay import DECAY_BY_RATE, RuleWithWeightDecay


@update_rule(
    squares=("v",),
    row_slots=("v",),
)
def partial_row_wise_adam(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    step_size: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    mean_square: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (mean_square - v)
    var -= step_size / (np.sqrt(v) + epsilon) * m


class PartialRowWiseAdamOptimizer(RuleWithWeightDecay, StepCountingOptimizer):
    """Adam with one mean square for each row of a table: FBGEMM's form.

        w[r] -= learning_rate * weight_decay * w[r]
        m[r] += (1 - beta1) * (g[r] - m[r])
        v[r] += (1 - beta2) * (mean(g[r]^2) - v[r])
        w[r] -= learning_rate * m'[r] / (sqrt(v'[r]) + epsilon)
        m', v' = m / (1 - beta1^t), v / (1 - beta2^t)

    It is FBGEMM's `PARTIAL_ROWWISE_ADAM`, and torchrec's `PartialRowWiseAdam`. A row is an entry
    along a variable's first axis; the mean is over all its elements. So a vector's steps are those
    of Adam, and a scalar is one row. A table of 64 columns has 65/128 of Adam's state.

    A sparse gradient updates the rows it names, and lets them decay: gradients of a row are added
    up before they are squared. `t` counts all steps, also those that do not name a row; it is the
    variable `step`, float64, shared by all variables. `minimize` and `apply_gradients` take
    `decay_var_list`: the variables that decay, by default `decay_variables`. Python floats keep
    all digits.

    Squares, their sum and the mean are computed in float32 for float16 and bfloat16, else in the
    variable's type: the sum overflows above 3e38, or 1.8e308 in float64. `v` has the variable's
    type. So in float16 a row whose `v` comes above 65,504 has infinity there, and NaN after the
    next step, as in Adam; values of `v` below 6e-8 are 0. Keep tables with such gradients in
    bfloat16 or float32, or scale their gradients down.
    """

    rule = partial_row_wise_adam

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.01,
        beta1: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        beta2: Annotated[
            Hyperparameter, "Decay of the average `v` of a row's mean squares."
        ] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-8,
        weight_decay: Annotated[Hyperparameter, DECAY_BY_RATE] = 0.0,
        **common: Unpack[DecayCommon],
    ) -> None:
        super().__init__(
            weight_decay,
            common,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, decay = self._given("learning_rate", "weight_decay")
        return {**self._bias_corrected(real), "weight_decay": real(learning_rate * decay)}
