"""Schedule-Free AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import DecayCommon, Hyperparameter, Range, update_rule
from gpuopt.optimizers.base.schedule_free import ScheduleFreeOptimizer


@update_rule(squares=("v",))
def schedule_free_adam_w(
    var: Any,
    grad: Any,
    z_minus_y: Any,
    v: Any,
    *,
    step_size: Any,
    weight_decay: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    weight: Any,
) -> None:
    v += (1 - beta2) * (grad * grad - v)
    step = step_size * grad / (np.sqrt(v) + epsilon) + weight_decay * var
    kept = (1 - weight) * (z_minus_y - beta1 * step)
    var += z_minus_y - step - kept
    z_minus_y[...] = kept


class ScheduleFreeAdamWOptimizer(ScheduleFreeOptimizer):
    """Schedule-Free AdamW (Defazio et al. 2024, algorithm 1): averages in place of a schedule.

        v += (1 - beta2) * (g^2 - v)
        z -= learning_rate * (g / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * y)
        x += c * (z - x)                               c = s(t) / (s(1) + ... + s(t))
        y = (1 - beta1) * z + beta1 * x                s(t) = (largest learning rate so far)^2

    The variable is `y`, where gradients are computed. A model is evaluated with `x`:
    `evaluation_weights` computes it. What is kept is `v`, and `z - y` in the slot `z_minus_y`.

    It is `schedulefree.AdamWScheduleFree` with its `r` of 0 and `weight_lr_power` of 2; its warm-up
    is a schedule of the learning rate here. The paper's algorithm has the warm-up alone in `s`. A
    sparse gradient updates the rows it names: the average of a row that it does not name stays
    where it is. Python floats keep all digits. The variables `step`, `weight_sum` and
    `largest_learning_rate` are float64; of the last two, each group has its own.
    """

    rule = schedule_free_adam_w

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size of `z`."] = 0.0025,
        beta1: Annotated[Hyperparameter, Range(above=0), "How much of `y` is `x`."] = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the squared gradient's average `v`."] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-8,
        weight_decay: Annotated[
            Hyperparameter, "Times the learning rate, the part of `y` that a step takes from `z`."
        ] = 0.0,
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

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, epsilon, decay = self._given("learning_rate", "epsilon", "weight_decay")
        root = np.sqrt(self._bias_correction("beta2", real))
        return {
            "step_size": real(learning_rate * root),
            "weight_decay": real(learning_rate * decay),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(epsilon * root),
            "weight": real(self._weight()),
        }
