"""Adagrad."""

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


@update_rule(squares=("accumulator",))
def adagrad(var: Any, grad: Any, accumulator: Any, *, learning_rate: Any) -> None:
    accumulator += grad * grad
    var -= learning_rate * grad / np.sqrt(accumulator)


class AdagradOptimizer(RuleOptimizer):
    """Adagrad (Duchi, Hazan & Singer 2011, section 1.3).

        n += g^2
        w -= learning_rate * g / sqrt(n)

    There is no epsilon: `n` starts above zero instead. A sparse gradient updates the rows it names.
    """

    rule = adagrad

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."],
        initial_accumulator_value: Annotated[float, Range(above=0), "What `n` starts with."] = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
        **common: Unpack[Additions],
    ) -> None:
        check_numbers(type(self), initial_accumulator_value=initial_accumulator_value)
        super().__init__(
            {"use_locking": use_locking, "name": name, **common}, learning_rate=learning_rate
        )
        self.initial_accumulator_value = initial_accumulator_value

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}
