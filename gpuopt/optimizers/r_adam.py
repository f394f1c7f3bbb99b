"""RAdam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Common,
    Hyperparameter,
    Range,
    update_rule,
)
from gpuopt.optimizers.base.caution import CAUTIOUS, CautiousOption
from gpuopt.state.counts import STEP_OF_EACH

# Below so many gradients, the average of their squares says too little.
_FEWEST = 5.0


@update_rule(squares=("v",))
def r_adam(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    *,
    step_size: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    is_rectified: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    if is_rectified:
        var -= step_size * m / (np.sqrt(v) + epsilon)
    else:
        var -= step_size * m


class RAdamOptimizer(CautiousOption):
    """RAdam (Liu et al. 2020, algorithm 2), in torch's form: Adam without a warm-up.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        rho = 2 / (1 - beta2) - 1
        rho(t) = rho - 2 * t * beta2^t / (1 - beta2^t)
        m' = m / (1 - beta1^t)

        w -= learning_rate * r * sqrt(1 - beta2^t) * m' / (sqrt(v) + epsilon)    rho(t) > 5
        w -= learning_rate * m'                                                  else
        r^2 = (rho(t) - 4) * (rho(t) - 2) * rho / ((rho - 4) * (rho - 2) * rho(t))

    It is `torch.optim.RAdam`: epsilon is added before the correction of `v`, as in TensorFlow's
    Adam, and 5 is the threshold; the paper has no epsilon, and 4. optax's `radam` differs in the
    place of epsilon alone.

    A sparse gradient updates the rows it names. Python floats keep all digits. `t` counts the steps
    of each variable, in its slot `step`.
    """

    rule = r_adam
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
        cautious: Annotated[bool, CAUTIOUS] = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            cautious, common, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon
        )

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, beta2 = self._given("learning_rate", "beta2")
        corrected = self._bias_correction("beta2", real)
        step_size = learning_rate / self._bias_correction("beta1", real)
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * self._step() * beta2 ** self._step() / (1 - beta2 ** self._step())
        is_rectified = length > _FEWEST
        if is_rectified:
            variance = (length - 4) * (length - 2) * longest
            variance /= (longest - 4) * (longest - 2) * length
            step_size *= np.sqrt(variance * corrected)
        return {
            "step_size": real(step_size),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(beta2),
            "epsilon": real(self._hyper("epsilon")),
            "is_rectified": real(is_rectified),
        }
