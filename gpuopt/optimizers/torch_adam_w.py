"""Adam with decoupled weight decay, as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.adam import adam
from gpuopt.optimizers.base import DecayCommon, Hyperparameter, Range
from gpuopt.optimizers.base.caution import CautiousOption
from gpuopt.optimizers.base.weight_decay import DECAY_BY_RATE, RuleWithWeightDecay
from gpuopt.state.counts import STEP_OF_EACH


class TorchAdamWOptimizer(RuleWithWeightDecay, CautiousOption):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), in torch's form.

        w -= learning_rate * weight_decay * w
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= learning_rate * m' / (sqrt(v') + epsilon)
        m', v' = m / (1 - beta1^t), v / (1 - beta2^t)

    It is `torch.optim.AdamW`; and optax's `adamw`, where all variables take part in every step. In
    `AdamWOptimizer`, which is TensorFlow's, the decay is `weight_decay * w`, and epsilon is added
    before the correction of `v`. With a `weight_decay` of 0, it is `torch.optim.Adam`.

    A sparse gradient updates the rows it names, and lets them decay. `minimize` and
    `apply_gradients` take `decay_var_list`: the variables that decay, by default
    `decay_variables`. Python floats keep all digits. `t` counts the steps of each variable, in its
    slot `step`.
    """

    rule = adam
    own_counts = STEP_OF_EACH

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.001,
        beta1: Annotated[
            Hyperparameter, Range(0, below=1), "Decay of the gradient's average `m`."
        ] = 0.9,
        beta2: Annotated[
            Hyperparameter, Range(0, below=1), "Decay of the squared gradient's average `v`."
        ] = 0.999,
        epsilon: Annotated[Hyperparameter, Range(0), "Keeps the division finite."] = 1e-8,
        weight_decay: Annotated[Hyperparameter, DECAY_BY_RATE] = 0.01,
        cautious: Annotated[
            bool,
            "Whether elements move against their gradient alone: a step `u` becomes `u * k / "
            "max(mean(k), 0.001)`, where `k` is 1 if `u * g < 0`, else 0 (Liang et al. 2024, in "
            "timm's form; the authors' code multiplies by `size / (sum(k) + 1)`). The mean is "
            "over the variable, so that a sparse gradient makes the step of a dense one; but only "
            "the rows that it names decay.",
        ] = False,
        **common: Unpack[DecayCommon],
    ) -> None:
        super().__init__(
            weight_decay,
            cautious,
            common,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, decay = self._given("learning_rate", "weight_decay")
        return {**self._bias_corrected(real), "weight_decay": real(learning_rate * decay)}
