"""Adagrad."""

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
def adagrad(var: Any, grad: Any, accumulator: Any, *, learning_rate: Any) -> None:
    accumulator += grad * grad
    var -= learning_rate * grad / np.sqrt(accumulator)


class AdagradOptimizer(RuleOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011, section 1.3).

        n += g^2
        w -= learning_rate * g / sqrt(n)

    There is no epsilon: `n` starts above zero instead. A sparse gradient updates the rows it names.

    Args:
        learning_rate: Step size.
        initial_accumulator_value: What `n` starts with, above 0.
        use_locking, name, on_nonfinite: See `Optimizer`.
        groups: See `ParameterGroup`.
        clip_norm, clip_value, clip_form: See `RuleOptimizer`.

    Raises:
        ValueError: `initial_accumulator_value` is not positive.
    """

    rule = adagrad

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
        **common: Unpack[Additions],
    ) -> None:
        require_positive(initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            {"use_locking": use_locking, "name": name, **common}, learning_rate=learning_rate
        )
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}
