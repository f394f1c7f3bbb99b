"""AdaMax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.adam import AdamOptimizer
from gpuopt.optimizers.base import Additions, Hyperparameter, update_rule


@update_rule(squares=("v",))
def ada_max(
    var: Any, grad: Any, m: Any, v: Any, *, step_size: Any, beta1: Any, beta2: Any, epsilon: Any
) -> None:
    m += (1 - beta1) * (grad - m)
    v[...] = np.maximum(beta2 * v, np.abs(grad))
    var -= step_size * m / (v + epsilon)


class AdaMaxOptimizer(AdamOptimizer):
    """AdaMax (Kingma & Ba 2015, algorithm 2), with an epsilon.

        m += (1 - beta1) * (g - m)
        v = max(beta2 * v, |g|)
        w -= learning_rate / (1 - beta1^t) * m / (v + epsilon)

    `v` is the paper's `u`. A sparse gradient updates the rows it names. `beta1^t` is the variable
    `beta1_power`, as Adam's. It is TensorFlow's `contrib.opt.AdaMaxOptimizer`.
    """

    rule = ada_max
    rule_of_other_rows = None
    betas = ("beta1",)

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the largest gradient `v`."] = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "AdaMax",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, use_locking, name, **common)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        given = self.this_thread.hyperparameters
        [beta1_power] = self._powers[self.this_thread.group]
        return {
            "step_size": real(given["learning_rate"]) / (1 - real(beta1_power.scalar())),
            "beta1": real(given["beta1"]),
            "beta2": real(given["beta2"]),
            "epsilon": real(given["epsilon"]),
        }
