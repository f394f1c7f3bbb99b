"""Adagrad, as torch has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Common,
    Hyperparameter,
    Range,
    StepCountingOptimizer,
    check_numbers,
    update_rule,
)
from gpuopt.state.counts import STEP_OF_EACH


@update_rule(squares=("accumulator",))
def torch_adagrad(
    var: Any, grad: Any, accumulator: Any, *, learning_rate: Any, epsilon: Any
) -> None:
    accumulator += grad * grad
    var -= learning_rate * grad / (np.sqrt(accumulator) + epsilon)


class TorchAdagradOptimizer(StepCountingOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011, section 1.3), in torch's form, which begins at 0.

        n += g^2
        w -= rate * g / (sqrt(n) + epsilon)
        rate = learning_rate / (1 + (t - 1) * learning_rate_decay)

    It is `torch.optim.Adagrad`, whose `lr_decay` is `learning_rate_decay`. In `AdagradOptimizer`,
    which is TensorFlow's, `n` starts at 0.1, and there is no epsilon; in those of optax and Keras,
    it starts at 0.1, and epsilon is inside the root.

    A sparse gradient updates the rows it names. Python floats keep all digits. `t` counts the steps
    of each variable, in its slot `step`.
    """

    rule = torch_adagrad
    own_counts = STEP_OF_EACH

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.01,
        learning_rate_decay: Annotated[
            Hyperparameter, "How fast the step size falls with the steps."
        ] = 0.0,
        epsilon: Annotated[Hyperparameter, Range(0), "Added to the root."] = 1e-10,
        initial_accumulator_value: Annotated[float, Range(0), "What `n` starts with."] = 0.0,
        **common: Unpack[Common],
    ) -> None:
        check_numbers(type(self), initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            common,
            learning_rate=learning_rate,
            learning_rate_decay=learning_rate_decay,
            epsilon=epsilon,
        )
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        rate, decay, epsilon = self._given("learning_rate", "learning_rate_decay", "epsilon")
        return {
            "learning_rate": real(rate / (1 + (self._step() - 1) * decay)),
            "epsilon": real(epsilon),
        }
