"""Schedule-Free SGD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import DecayCommon, Hyperparameter, Range, update_rule
from gpuopt.optimizers.base.schedule_free import ScheduleFreeOptimizer


@update_rule
def schedule_free_sgd(
    var: Any,
    grad: Any,
    z_minus_y: Any,
    *,
    learning_rate: Any,
    beta1: Any,
    weight_decay: Any,
    weight: Any,
) -> None:
    step = learning_rate * (grad + weight_decay * var)
    kept = (1 - weight) * (z_minus_y - beta1 * step)
    var += z_minus_y - step - kept
    z_minus_y[...] = kept


class ScheduleFreeSGDOptimizer(ScheduleFreeOptimizer):
    """Schedule-Free SGD (Defazio et al. 2024, equations 3 to 5): averages in place of a schedule.

        z -= learning_rate * (g + weight_decay * y)
        x += c * (z - x)                               c = s(t) / (s(1) + ... + s(t))
        y = (1 - beta1) * z + beta1 * x                s(t) = (largest learning rate so far)^2

    The variable is `y`, where gradients are computed. A model is evaluated with `x`:
    `evaluation_weights` computes it. What is kept is `z - y`, in the slot `z_minus_y`.

    It is `schedulefree.SGDScheduleFree` with its `r` of 0 and `weight_lr_power` of 2; its warm-up
    is a schedule of the learning rate here. A sparse gradient updates the rows it names: the
    average of a row that it does not name stays where it is. Python floats keep all digits. The
    variables `step`, `weight_sum` and `largest_learning_rate` are float64; of the last two, each
    group has its own.
    """

    rule = schedule_free_sgd

    def __init__(
        self,
        learning_rate: Annotated[
            Hyperparameter, "Step size of `z`: about ten times that of SGD with momentum."
        ] = 1.0,
        beta1: Annotated[
            Hyperparameter, Range(above=0), "How much of `y` is `x`; peers call it momentum."
        ] = 0.9,
        weight_decay: Annotated[Hyperparameter, "How much of `y` is added to a gradient."] = 0.0,
        **common: Unpack[DecayCommon],
    ) -> None:
        super().__init__(
            common, learning_rate=learning_rate, beta1=beta1, weight_decay=weight_decay
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        names = ("learning_rate", "beta1", "weight_decay")
        return {**{name: real(self._hyper(name)) for name in names}, "weight": real(self._weight())}
