"""Row-wise Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    AllDigitsOptimizer,
    DecayCommon,
    Hyperparameter,
    Range,
    check_numbers,
    update_rule,
)
from gpuopt.optimizers.base.weight_decay import DECAY_BY_RATE, RuleWithWeightDecay


@update_rule(
    squares=("accumulator",),
    row_slots=("accumulator",),
)
def row_wise_adagrad(
    var: Any, grad: Any, accumulator: Any, *, learning_rate: Any, epsilon: Any, mean_square: Any
) -> None:
    accumulator += mean_square
    var -= learning_rate / (np.sqrt(accumulator) + epsilon) * grad


class RowWiseAdagradOptimizer(RuleWithWeightDecay, AllDigitsOptimizer):
    """Adagrad with one number for each row of a table (Gupta et al. 2014): FBGEMM's form.

        w[r] -= learning_rate * weight_decay * w[r]
        n[r] += mean(g[r]^2)
        w[r] -= learning_rate * g[r] / (sqrt(n[r]) + epsilon)

    It is FBGEMM's `EXACT_ROWWISE_ADAGRAD`, with no weight decay or the mode `DECOUPLE`, and
    torchrec's `RowWiseAdagrad`, whose epsilon is 1e-10. A row is an entry along a variable's first
    axis; the mean is over all its elements. So a vector's steps are those of Adagrad with epsilon,
    and a scalar is one row. A table of 64 columns has 1/64 of Adagrad's state.

    A sparse gradient updates the rows it names, and lets them decay: gradients of a row are added
    up before they are squared. `minimize` and `apply_gradients` take `decay_var_list`: the
    variables that decay, by default `decay_variables`. Python floats keep all digits.

    Squares, their sum and the mean are computed in float32 for float16 and bfloat16, else in the
    variable's type: the sum overflows above 3e38, or 1.8e308 in float64. `n` has the variable's
    type. So in float16 a row whose `n` comes above 65,504 has infinity there, and stays where it
    is from the next step on, but for its decay; mean squares below 6e-8 are 0. Keep tables with
    such gradients in bfloat16 or float32, or scale their gradients down.
    """

    rule = row_wise_adagrad

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.01,
        initial_accumulator_value: Annotated[float, Range(0), "What `n` starts with."] = 0.0,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-8,
        weight_decay: Annotated[Hyperparameter, DECAY_BY_RATE] = 0.0,
        **common: Unpack[DecayCommon],
    ) -> None:
        check_numbers(type(self), initial_accumulator_value=initial_accumulator_value)
        super().__init__(weight_decay, common, learning_rate=learning_rate, epsilon=epsilon)
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, decay = self._given("learning_rate", "weight_decay")
        return {**super()._scalars(real), "weight_decay": real(learning_rate * decay)}
