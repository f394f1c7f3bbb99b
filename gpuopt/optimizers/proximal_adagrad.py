"""Proximal Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    RuleOptimizer,
    require_positive,
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

    Args:
        learning_rate: Step size.
        initial_accumulator_value: What `n` starts with, above 0.
        l1_regularization_strength: Makes weights exactly 0.
        l2_regularization_strength: Makes weights small.
        use_locking, name, on_nonfinite: See `Optimizer`.
        groups: See `ParameterGroup`.
        clip_norm, clip_value, clip_form: See `RuleOptimizer`.

    Raises:
        ValueError: `initial_accumulator_value` is not positive.
    """

    rule = proximal_adagrad

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: Hyperparameter = 0.0,
        l2_regularization_strength: Hyperparameter = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
        **common: Unpack[Additions],
    ) -> None:
        require_positive(initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            l1=l1_regularization_strength,
            l2=l2_regularization_strength,
        )
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}
