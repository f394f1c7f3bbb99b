"""RMSProp, plain and centered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer, update_rule


@update_rule(squares=("rms",))
def rms_prop(
    var: Any,
    grad: Any,
    rms: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    decay: Any,
    momentum_decay: Any,
    epsilon: Any,
) -> None:
    rms += (1 - decay) * (grad * grad - rms)
    momentum *= momentum_decay
    momentum += learning_rate * grad / np.sqrt(rms + epsilon)
    var -= momentum


@update_rule(squares=("rms",))
def centered_rms_prop(
    var: Any,
    grad: Any,
    rms: Any,
    mg: Any,
    momentum: Any,
    *,
    learning_rate: Any,
    decay: Any,
    momentum_decay: Any,
    epsilon: Any,
) -> None:
    rms += (1 - decay) * (grad * grad - rms)
    mg += (1 - decay) * (grad - mg)
    momentum *= momentum_decay
    momentum += learning_rate * grad / np.sqrt(rms - mg * mg + epsilon)
    var -= momentum


class RMSPropOptimizer(RuleOptimizer):
    """RMSProp (Tieleman & Hinton 2012, lecture 6e), with momentum as in Graves 2013, eq. 38-45.

        r += (1 - decay) * (g^2 - r)
        mg += (1 - decay) * (g - mg)                    centered only
        b = momentum * b + learning_rate * g / sqrt(r [- mg^2] + epsilon)
        w -= b

    `r` starts at 1, not 0, and epsilon is inside the root: TensorFlow's choices, which make the
    first steps small. A sparse gradient updates the rows it names; elsewhere nothing decays, and
    momentum moves nothing.
    """

    rule = rms_prop
    hyperparameter_of: ClassVar[Mapping[str, str]] = {"momentum_decay": "momentum"}

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        decay: Annotated[Hyperparameter, "Of the averages `r` and `mg`."] = 0.9,
        momentum: Annotated[Hyperparameter, "What remains of the buffer `b` after a step."] = 0.0,
        epsilon: Annotated[Hyperparameter, "Added inside the root."] = 1e-10,
        use_locking: bool = False,
        centered: Annotated[
            bool, "Divide by the deviation instead of the root mean square."
        ] = False,
        name: str = "RMSProp",
        **common: Unpack[Additions],
    ) -> None:
        if centered:
            self.rule = centered_rms_prop
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            decay=decay,
            momentum=momentum,
            epsilon=epsilon,
        )

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {**super()._initial_slot_values(), "rms": 1.0}
