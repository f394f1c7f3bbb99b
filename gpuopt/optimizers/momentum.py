"""Momentum, plain and Nesterov's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

from gpuopt.optimizers.base import Additions, Hyperparameter, RuleOptimizer, update_rule


@update_rule
def momentum(var: Any, grad: Any, momentum: Any, *, learning_rate: Any, decay: Any) -> None:
    momentum *= decay
    momentum += grad
    var -= learning_rate * momentum


@update_rule
def nesterov_momentum(
    var: Any, grad: Any, momentum: Any, *, learning_rate: Any, decay: Any
) -> None:
    momentum *= decay
    momentum += grad
    var -= learning_rate * (grad + decay * momentum)


class MomentumOptimizer(RuleOptimizer):
    """Gradient descent with momentum, in TensorFlow 1's form.

        a = momentum * a + g
        w -= learning_rate * a                          plain
        w -= learning_rate * (g + momentum * a)         Nesterov

    The learning rate is not part of the accumulator `a`, so changing it rescales the whole history.
    Polyak 1964; Nesterov's form as in Sutskever et al. 2013, section 2. A sparse gradient updates
    the rows it names; `a` does not decay elsewhere.
    """

    rule = momentum
    hyperparameter_of: ClassVar[Mapping[str, str]] = {"decay": "momentum"}

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        momentum: Annotated[Hyperparameter, "What remains of the accumulator after a step."],
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: Annotated[bool, "Look ahead along the accumulator."] = False,
        **common: Unpack[Additions],
    ) -> None:
        if use_nesterov:
            self.rule = nesterov_momentum
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            momentum=momentum,
        )
