"""Gradient descent with momentum, dampening and weight decay, as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    DecayCommon,
    Hyperparameter,
    StepCountingOptimizer,
    update_rule,
)
from gpuopt.state.counts import STEP_OF_EACH


@update_rule
def torch_sgd(var: Any, grad: Any, *, learning_rate: Any, weight_decay: Any) -> None:
    var -= learning_rate * (grad + weight_decay * var)


@update_rule
def torch_momentum(
    var: Any,
    grad: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    weight_decay: Any,
    decay: Any,
    added: Any,
) -> None:
    momentum *= decay
    momentum += added * (grad + weight_decay * var)
    var -= learning_rate * momentum


@update_rule
def torch_nesterov(
    var: Any, grad: Any, momentum: Any, *, learning_rate: Any, weight_decay: Any, decay: Any
) -> None:
    step = grad + weight_decay * var
    momentum *= decay
    momentum += step
    var -= learning_rate * (step + decay * momentum)


class TorchSGDOptimizer(StepCountingOptimizer):
    """Gradient descent with momentum, in torch's form: with dampening and weight decay.

        g' = g + weight_decay * w
        a = momentum * a + (1 - dampening) * g'    a = g' in the first step
        w -= learning_rate * a                     plain
        w -= learning_rate * (g' + momentum * a)   Nesterov
        w -= learning_rate * g'                    without momentum; there is no a

    It is `torch.optim.SGD`. The decay is L2 regularization: it goes through the momentum. Without
    decay and dampening, it is `MomentumOptimizer`. Each variable has a first step of its
    own, whose gradient is not dampened.

    A sparse gradient updates the rows it names; `a` does not decay elsewhere. Python floats keep
    all digits. The slot `step` counts the steps of a variable where there is a dampening; else the
    variable `step`, float64, counts those of all.

    Raises:
        ValueError: `use_nesterov` is given without momentum, or with dampening.
    """

    rule = torch_momentum

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.001,
        momentum: Annotated[Hyperparameter, "What remains of the accumulator after a step."] = 0.0,
        dampening: Annotated[
            Hyperparameter, "The part of each gradient, after the first, that is left out of `a`."
        ] = 0.0,
        weight_decay: Annotated[
            Hyperparameter, "How much of the weights is added to a gradient."
        ] = 0.0,
        use_nesterov: Annotated[bool, "Look ahead along the accumulator."] = False,
        **common: Unpack[DecayCommon],
    ) -> None:
        has_momentum = callable(momentum) or momentum != 0
        if use_nesterov and (not has_momentum or callable(dampening) or dampening != 0):
            raise ValueError(
                "use_nesterov needs momentum and no dampening, got "
                f"momentum={momentum!r} and dampening={dampening!r}"
            )
        # A group may have those alone that the rule has.
        hyperparameters = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        if has_momentum:
            hyperparameters["momentum"] = momentum
        if has_momentum and not use_nesterov:
            hyperparameters["dampening"] = dampening
            self.own_counts = STEP_OF_EACH
        if use_nesterov:
            self.rule = torch_nesterov
        elif not has_momentum:
            self.rule = torch_sgd
        super().__init__(common, **hyperparameters)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        given = self.this_thread.hyperparameters
        scalars = {name: real(given[name]) for name in ("learning_rate", "weight_decay")}
        if "momentum" in given:
            scalars["decay"] = real(given["momentum"])
        if "dampening" in given:
            scalars["added"] = real(1 if self._step() == 1 else 1 - given["dampening"])
        return scalars
