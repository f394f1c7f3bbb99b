"""Adagrad with dual averaging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    Range,
    RuleOptimizer,
    check_numbers,
    update_rule,
)
from gpuopt.step.step import checked_global_step


@update_rule(squares=("gradient_squared_accumulator",))
def adagrad_da(
    var: Any,
    grad: Any,
    gradient_accumulator: Any,
    gradient_squared_accumulator: Any,
    *,
    learning_rate: Any,
    l1_threshold: Any,
    l2_scale: Any,
) -> None:
    gradient_accumulator += grad
    gradient_squared_accumulator += grad * grad
    beyond = gradient_accumulator - np.clip(gradient_accumulator, -l1_threshold, l1_threshold)
    var[...] = -learning_rate * beyond / (l2_scale + np.sqrt(gradient_squared_accumulator))


class AdagradDAOptimizer(RuleOptimizer):
    """Adagrad with dual averaging (Duchi, Hazan & Singer 2011, section 1.3, eq. 3).

        G += g,  n += g^2,  T = global_step + 1
        w = -learning_rate * soft_threshold(G, l1 * T) / (l2 * T * learning_rate + sqrt(n))

    The weights are rebuilt from the sums: what they were before the first step is forgotten. `T` is
    read before the step is counted, so the optimizer must be given the `global_step` that
    `apply_gradients` increments. A sparse gradient rebuilds the rows it names, with the current
    `T`.

    Raises:
        TypeError: `global_step` is not a scalar variable or array.
    """

    rule = adagrad_da

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        global_step: Annotated[Any, "The scalar variable or array that counts the steps."],
        initial_gradient_squared_accumulator_value: Annotated[
            float, Range(above=0), "What `n` starts with."
        ] = 0.1,
        l1_regularization_strength: Annotated[Hyperparameter, "Makes weights exactly 0."] = 0.0,
        l2_regularization_strength: Annotated[Hyperparameter, "Makes weights small."] = 0.0,
        use_locking: bool = False,
        name: str = "AdagradDA",
        **common: Unpack[Additions],
    ) -> None:
        check_numbers(
            type(self),
            initial_gradient_squared_accumulator_value=initial_gradient_squared_accumulator_value,
        )
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
        self._initial_squared = initial_gradient_squared_accumulator_value
        self._global_step = checked_global_step(global_step)

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {
            "gradient_accumulator": 0.0,
            "gradient_squared_accumulator": self._initial_squared,
        }

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        step = real(int(self._global_step) + 1)
        learning_rate = real(self._hyper("learning_rate"))
        return {
            "learning_rate": learning_rate,
            "l1_threshold": real(self._hyper("l1_regularization_strength")) * step,
            "l2_scale": real(self._hyper("l2_regularization_strength")) * step * learning_rate,
        }
