"""Nadam: Adam with Nesterov momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpuopt.optimizers.adam import DECAYS, AdamOptimizer
from gpuopt.optimizers.base import Unnamed, update_rule


@update_rule(squares=("v",))
def nadam(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    gradient_step: Any,
    average_step: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    var -= (gradient_step * grad + average_step * m) / (np.sqrt(v) + epsilon)


@update_rule(squares=("v",), unnamed=Unnamed(DECAYS))
def nadam_decay(var: Any, grad: Any, m: Any, v: Any, *, beta1: Any, beta2: Any) -> None:
    m *= beta1
    v *= beta2


class NadamOptimizer(AdamOptimizer):
    """Nadam (Dozat 2016), in TensorFlow's form: Adam whose step looks ahead along `m`.

        m = beta1 * m + (1 - beta1) * g
        v += (1 - beta2) * (g^2 - v)
        w -= alpha * ((1 - beta1) * g + beta1 * m) / (sqrt(v) + epsilon)

    `alpha` is Adam's step size of this step, so `beta1` does not follow Dozat's schedule. A sparse
    gradient moves `w` in the rows that it names; `m` and `v` decay in every row, as in TensorFlow.
    It is TensorFlow's `contrib.opt.NadamOptimizer`, and takes `AdamOptimizer`'s arguments.
    """

    rule = nadam
    rule_of_other_rows = nadam_decay
    instead_of_all_rows = ""

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        scalars = dict(super()._scalars(real))
        step_size = scalars.pop("step_size")
        return {
            **scalars,
            "gradient_step": step_size * (1 - scalars["beta1"]),
            "average_step": step_size * scalars["beta1"],
        }
