"""AMSGrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Common,
    Hyperparameter,
    update_rule,
)
from gpuopt.optimizers.base.caution import CAUTIOUS, CautiousOption
from gpuopt.state.counts import STEP_OF_EACH


@update_rule(squares=("v", "vhat"))
def ams_grad(
    var: Any,
    grad: Any,
    m: Any,
    v: Any,
    vhat: Any,
    *,
    step_size: Any,
    beta1: Any,
    beta2: Any,
    epsilon: Any,
    scale: Any,
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    vhat[...] = np.maximum(vhat, scale * v)
    var -= step_size * m / (np.sqrt(vhat) + epsilon)


class AMSGradOptimizer(CautiousOption):
    """AMSGrad (Reddi, Kale & Kumar 2018, algorithm 2): Adam whose steps per gradient never grow.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        m', v' = m / (1 - beta1^t), v / (1 - beta2^t)

        vhat = max(vhat, v)                                                          "torch"
        w -= learning_rate * m' / (sqrt(vhat / (1 - beta2^t)) + epsilon)

        vhat = max(vhat, v')                                                         "optax"
        w -= learning_rate * m' / (sqrt(vhat) + epsilon)

    The paper corrects no bias, and peers disagree on the `v` whose maximum they take. The form
    "torch" is `torch.optim.Adam(amsgrad=True)`, and that of tf.keras but for its epsilon; "optax"
    is `optax.amsgrad`. In optax's, the first gradients count for good: steps of an element whose
    first gradient is large stay small.

    A sparse gradient updates the rows it names. Python floats keep all digits. `t` counts the steps
    of each variable, in its slot `step`, as torch does; in the form "optax" it is the variable
    `step`, float64, shared by all variables.

    Raises:
        ValueError: there is no such form.
    """

    rule = ams_grad

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.001,
        beta1: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the squared gradient's average `v`."] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-8,
        form: Annotated[Literal["torch", "optax"], '"torch" or "optax".'] = "torch",
        cautious: Annotated[bool, CAUTIOUS] = False,
        **common: Unpack[Common],
    ) -> None:
        if form not in ("torch", "optax"):
            raise ValueError(f'form must be "torch" or "optax", got {form!r}')
        self._form = form
        if form == "torch":
            self.own_counts = STEP_OF_EACH
        super().__init__(
            cautious, common, learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon
        )

    def _hyperparameters_to_save(self) -> dict[str, Any]:
        return {**super()._hyperparameters_to_save(), "form": self._form}

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        learning_rate, epsilon = self._given("learning_rate", "epsilon")
        corrected = self._bias_correction("beta2", real)
        root = np.sqrt(corrected) if self._form == "torch" else 1.0
        return {
            "step_size": real(learning_rate * root / self._bias_correction("beta1", real)),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(epsilon * root),
            "scale": real(1.0 if self._form == "torch" else 1 / corrected),
        }
