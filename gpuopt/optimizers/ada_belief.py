"""AdaBelief."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Common,
    Hyperparameter,
    update_rule,
)
from gpuopt.optimizers.base.caution import CAUTIOUS, CautiousOption


@update_rule(squares=("s",))
def ada_belief(
    var: Any,
    grad: Any,
    m: Any,
    s: Any,
    *,
    step_size: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    epsilon_root: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    s += (1 - beta2) * ((grad - m) * (grad - m) - s) + epsilon_root
    var -= step_size * m / (np.sqrt(s) + epsilon)


class AdaBeliefOptimizer(CautiousOption):
    """AdaBelief (Zhuang et al. 2020, algorithm 2): long steps where gradients are as expected.

        m += (1 - beta1) * (g - m)
        s += (1 - beta2) * ((g - m)^2 - s) + epsilon_root
        m', s' = m / (1 - beta1^t), s / (1 - beta2^t)
        w -= learning_rate * m' / (sqrt(s') + epsilon)

    It is `optax.adabelief`, with its defaults; the paper has one epsilon for both, and adds it to
    `s` in every step, as this does. A sparse gradient updates the rows it names. Python floats keep
    all digits. `t` is the variable `step`, float64, shared by all variables.
    """

    rule = ada_belief

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.001,
        beta1: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        beta2: Annotated[
            Hyperparameter,
            "Decay of the average `s` of the squared distance between gradient and `m`.",
        ] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-16,
        epsilon_root: Annotated[Hyperparameter, "What is added to `s` in every step."] = 1e-16,
        cautious: Annotated[bool, CAUTIOUS] = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            cautious,
            common,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            epsilon_root=epsilon_root,
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        return {**self._bias_corrected(real), "epsilon_root": real(self._hyper("epsilon_root"))}
