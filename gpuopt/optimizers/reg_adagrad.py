"""Adagrad that can leave its accumulator alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np

from gpuopt.optimizers.adagrad import AdagradOptimizer
from gpuopt.optimizers.base import Additions, Hyperparameter, update_rule
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.request import Listed


@update_rule(squares=("accumulator",))
def frozen_adagrad(var: Any, grad: Any, accumulator: Any, *, learning_rate: Any) -> None:
    var -= learning_rate * grad / np.sqrt(accumulator)


class RegAdagradOptimizer(AdagradOptimizer):
    """Adagrad with steps that do not count in `n`, as those of a regularization term.

        with optimizer.avoid_updating_slots():
            optimizer.apply_gradients(...)    # w -= learning_rate * g / sqrt(n)

    All other steps are Adagrad's. It is TensorFlow's `contrib.opt.RegAdagradOptimizer`.
    """

    def __init__(
        self,
        learning_rate: Hyperparameter,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "RegAdagrad",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value, use_locking, name, **common)
        self._avoiding = threading.local()

    @contextmanager
    def avoid_updating_slots(self) -> Iterator[None]:
        """Has this thread's steps inside read `n` and not change it."""
        outer, self._avoiding.now = self._avoids, True
        try:
            yield
        finally:
            self._avoiding.now = outer

    @property
    def _avoids(self) -> bool:
        return getattr(self._avoiding, "now", False)

    def _rule_of_call(
        self, variables: Sequence[Any], is_sparse: bool, listed: Listed
    ) -> tuple[UpdateRule, bytes]:
        rule, choice = super()._rule_of_call(variables, is_sparse, listed)
        return frozen_adagrad if self._avoids else rule, choice
