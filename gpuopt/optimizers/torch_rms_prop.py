"""RMSprop, plain and centered, as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    AllDigitsOptimizer,
    Common,
    Hyperparameter,
    Range,
    update_rule,
)


@update_rule(squares=("rms",))
def torch_rms_prop(
    var: Any, grad: Any, rms: Any, *, learning_rate: Any, decay: Any, added: Any, epsilon: Any
) -> None:
    rms *= decay
    rms += added * (grad * grad)
    var -= learning_rate * grad / (np.sqrt(rms) + epsilon)


@update_rule(squares=("rms",))
def torch_rms_prop_momentum(
    var: Any,
    grad: Any,
    rms: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    decay: Any,
    added: Any,
    epsilon: Any,
    momentum_decay: Any,
) -> None:
    rms *= decay
    rms += added * (grad * grad)
    momentum *= momentum_decay
    momentum += grad / (np.sqrt(rms) + epsilon)
    var -= learning_rate * momentum


@update_rule(squares=("rms",))
def torch_centered_rms_prop(
    var: Any,
    grad: Any,
    rms: Any,
    mg: Any,
    *,
    learning_rate: Any,
    decay: Any,
    added: Any,
    epsilon: Any,
) -> None:
    rms *= decay
    rms += added * (grad * grad)
    mg += added * (grad - mg)
    var -= learning_rate * grad / (np.sqrt(rms - mg * mg) + epsilon)


@update_rule(squares=("rms",))
def torch_centered_rms_prop_momentum(
    var: Any,
    grad: Any,
    rms: Any,
    mg: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    decay: Any,
    added: Any,
    epsilon: Any,
    momentum_decay: Any,
) -> None:
    rms *= decay
    rms += added * (grad * grad)
    mg += added * (grad - mg)
    momentum *= momentum_decay
    momentum += grad / (np.sqrt(rms - mg * mg) + epsilon)
    var -= learning_rate * momentum


class TorchRMSpropOptimizer(AllDigitsOptimizer):
    """RMSprop (Tieleman & Hinton 2012, lecture 6e), in torch's form, which begins at 0.

        r = decay * r + (1 - decay) * g^2
        mg = decay * mg + (1 - decay) * g               centered only
        b = momentum * b + g / (sqrt(r [- mg^2]) + epsilon)
        w -= learning_rate * b

    It is `torch.optim.RMSprop`, whose `alpha` is `decay`, and optax's `rmsprop` with
    `eps_in_sqrt=False`. `r` starts at 0 and epsilon stands beside the root, so the first steps are
    long: `learning_rate / sqrt(1 - decay)` for each element. In `RMSPropOptimizer`, which is
    TensorFlow's, `r` starts at 1, epsilon is inside the root, and `b` has the learning rate in it.
    As in torch, `r - mg^2` may be negative by rounding where gradients do not change, and the
    element is NaN then. Without momentum there is no `b`.

    A sparse gradient updates the rows it names; elsewhere nothing decays, and momentum moves
    nothing. Python floats keep all digits.
    """

    rule = torch_rms_prop
    hyperparameter_of: ClassVar[Mapping[str, str]] = {"momentum_decay": "momentum"}

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.01,
        decay: Annotated[Hyperparameter, "Of the averages `r` and `mg`."] = 0.99,
        epsilon: Annotated[Hyperparameter, Range(0), "Added to the root."] = 1e-8,
        momentum: Annotated[Hyperparameter, "What remains of the buffer `b` after a step."] = 0.0,
        centered: Annotated[
            bool, "Divide by the deviation instead of the root mean square."
        ] = False,
        **common: Unpack[Common],
    ) -> None:
        hyperparameters = {"learning_rate": learning_rate, "decay": decay, "epsilon": epsilon}
        has_momentum = callable(momentum) or momentum != 0
        if has_momentum:  # else no group may have one
            hyperparameters["momentum"] = momentum
            self.rule = torch_centered_rms_prop_momentum if centered else torch_rms_prop_momentum
        elif centered:
            self.rule = torch_centered_rms_prop
        super().__init__(common, **hyperparameters)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        scalars = {name: real(self._hyper(name)) for name in ("learning_rate", "decay", "epsilon")}
        # Of all digits: 1 - 0.99 of float32 is off by 1e-6.
        scalars["added"] = real(1 - np.float64(self._hyper("decay")))
        if "momentum_decay" in self.rule.scalars:
            scalars["momentum_decay"] = real(self._hyper("momentum"))
        return scalars
