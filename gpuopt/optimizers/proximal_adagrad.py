"""Proximal Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    Range,
    RuleOptimizer,
    check_numbers,
    update_rule,
)


@update_rule(squares=("accumulator",))
def proximal_adagrad(
    var: Any, grad: Any, accumulator: Any, *, learning_rate: Any, l1: Any, l2: Any
) -> None:
    accumulator += grad * grad
    step_size = learning_rate / np.sqrt(accumulator)
    var -= step_size * grad
    threshold = step_size * l1
    var -= np.clip(var, -threshold, threshold)
    var /= 1 + l2 * step_size


class ProximalAdagradOptimizer(RuleOptimizer):
    """Forward-backward splitting (Duchi & Singer 2009) with Adagrad's step sizes.

        n += g^2,  e = learning_rate / sqrt(n)
        w = soft_threshold(w - e * g, e * l1) / (1 + l2 * e)

    A sparse gradient updates the rows it names.
    """

    rule = proximal_adagrad
    hyperparameter_of: ClassVar[Mapping[str, str]] = {
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
    }

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        initial_accumulator_value: Annotated[float, Range(above=0), "What `n` starts with."] = 0.1,
        l1_regularization_strength: Annotated[Hyperparameter, "Makes weights exactly 0."] = 0.0,
        l2_regularization_strength: Annotated[Hyperparameter, "Makes weights small."] = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
        **common: Unpack[Additions],
    ) -> None:
        check_numbers(type(self), initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
        )
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}
