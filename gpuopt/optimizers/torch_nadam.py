"""NAdam, as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Common,
    Hyperparameter,
    Range,
)
from gpuopt.optimizers.base.caution import CAUTIOUS, CautiousOption
from gpuopt.optimizers.nadam import nadam
from gpuopt.state.state import Range as StateRange


class TorchNAdamOptimizer(CautiousOption):
    """NAdam (Dozat 2016, algorithm 2), in torch's form: with Dozat's schedule of `mu`.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        mu(t) = beta1 * (1 - 0.96^(momentum_decay * t) / 2)
        ahead = (1 - mu(t)) * g / (1 - mu(1) ... mu(t))
              + mu(t+1) * m / (1 - mu(1) ... mu(t+1))
        w -= learning_rate * ahead / (sqrt(v / (1 - beta2^t)) + epsilon)

    It is `torch.optim.NAdam`, but that torch keeps the product of `mu` in float32. In
    `NadamOptimizer`, which is contrib's of TensorFlow, and in `optax.nadam`, `mu` is `beta1` in
    every step; torch's is about half of that at first. Those two differ in how they correct the
    bias of what is ahead.

    A sparse gradient updates the rows it names. Python floats keep all digits. `t` counts the steps
    of each variable, in its slot `step`; the slot `mu_product` is the product of `mu` so far.
    """

    rule = nadam
    counters: ClassVar[Mapping[str, float]] = {"step": 0.0, "mu_product": 1.0}
    own_counts = MappingProxyType({"step": np.int64(0), "mu_product": np.float64(1)})

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.002,
        beta1: Annotated[
            Hyperparameter, Range(0, below=1), "Decay of the gradient's average `m`."
        ] = 0.9,
        beta2: Annotated[
            Hyperparameter, Range(0, below=1), "Decay of the squared gradient's average `v`."
        ] = 0.999,
        epsilon: Annotated[Hyperparameter, Range(0), "Keeps the division finite."] = 1e-8,
        momentum_decay: Annotated[Hyperparameter, Range(0), "How fast `mu` grows."] = 0.004,
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
            momentum_decay=momentum_decay,
        )

    def _counter_ranges(self) -> Mapping[str, StateRange]:
        return {"mu_product": StateRange(-1.0, 1.0, np.float64)}

    def _mu(self, step: np.float64) -> np.float64:
        beta1, momentum_decay = self._given("beta1", "momentum_decay")
        return beta1 * (1 - 0.5 * np.float64(0.96) ** (step * momentum_decay))

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, epsilon = self._given("learning_rate", "epsilon")
        root = np.sqrt(self._bias_correction("beta2", real))
        mu, next_mu = self._mu(self._step()), self._mu(self._step() + 1)
        product = self._count("mu_product") * mu
        return {
            "gradient_step": real(learning_rate * root * (1 - mu) / (1 - product)),
            "average_step": real(learning_rate * root * next_mu / (1 - product * next_mu)),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(epsilon * root),
        }

    def _count_in_group(self) -> None:
        self._counter("mu_product").multiply(self._mu(self._step()))
