"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    AllDigitsOptimizer,
    DecayCommon,
    Hyperparameter,
    update_rule,
)
from gpuopt.optimizers.base.weight_decay import DECAY_BY_RATE, RuleWithWeightDecay


@update_rule
def lion(var: Any, grad: Any, m: Any, *, learning_rate: Any, beta1: Any, beta2: Any) -> None:
    var -= learning_rate * np.sign(beta1 * m + (1 - beta1) * grad)
    m += (1 - beta2) * (grad - m)


class LionOptimizer(RuleWithWeightDecay, AllDigitsOptimizer):
    """Lion (Chen et al. 2023, algorithm 2): a step of the same length for every weight.

        w -= learning_rate * weight_decay * w
        w -= learning_rate * sign(beta1 * m + (1 - beta1) * g)
        m += (1 - beta2) * (g - m)

    There is one form; it is lion-pytorch's, and optax's `lion` but for its default decay. The paper
    advises learning rates of a third to a tenth of AdamW's, and a decay as much larger.

    A sparse gradient updates the rows it names, and lets them decay. `minimize` and
    `apply_gradients` take `decay_var_list`: the variables that decay, by default
    `decay_variables`. Python floats keep all digits.
    """

    rule = lion

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "How far each weight moves."] = 0.0001,
        beta1: Annotated[
            Hyperparameter, "How much of `m`, against the gradient, is in the direction."
        ] = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.99,
        weight_decay: Annotated[Hyperparameter, DECAY_BY_RATE] = 0.0,
        **common: Unpack[DecayCommon],
    ) -> None:
        super().__init__(
            weight_decay, common, learning_rate=learning_rate, beta1=beta1, beta2=beta2
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, decay = self._given("learning_rate", "weight_decay")
        return {**super()._scalars(real), "weight_decay": real(learning_rate * decay)}
