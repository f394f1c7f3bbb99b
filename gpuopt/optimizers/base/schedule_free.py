"""Code shared by the Schedule-Free optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import compute_type
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.optimizers.base.step_counting import StepCountingOptimizer
from gpuopt.state.state import Range
from gpuopt.variables.operators import reading
from gpuopt.variables.scalars import as_scalar
from gpuopt.variables.variable import Variable, as_variable


class ScheduleFreeOptimizer(StepCountingOptimizer):
    """Base of Schedule-Free SGD and AdamW: a variable is `y`, where gradients are computed.

    The slot `z_minus_y` begins at 0, as `y` and `z` begin at the same weights. A rule takes the
    scalar `weight`, of `z` in the average `x`.
    """

    counters: ClassVar[Mapping[str, float]] = {
        "step": 0.0,
        "weight_sum": 0.0,
        "largest_learning_rate": 0.0,
    }

    def evaluation_weights(self, var: Any) -> Any:
        """Returns `x`, the average with which to evaluate a model.

        Args:
            var: A variable that this optimizer updates. It stays at `y`, where gradients belong.

        Returns:
            A new array of the variable's kind, shape and dtype: `y - (1 / beta1 - 1) * (z - y)`.
            For a variable that no step has updated, a copy of it.
        """
        variable = as_variable(var)
        slot = self.state.slot(variable, "z_minus_y")
        with backend_for(variable.device).enter(variable.identity), reading(variable, slot):
            return ignore_fp_warnings(self._average, variable, slot)

    def _average(self, variable: Variable, slot: Variable | None) -> Any:
        if slot is None:
            return variable.storage.copy()
        real = compute_type(variable.dtype)
        number = self._grouping.number_of(variable)
        given = self.groups[number - 1] if number else self.hyperparameters
        beta1 = as_scalar(self._call_if_callable(given["beta1"]), "beta1")
        y, z_minus_y = (each.storage.astype(real, copy=False) for each in (variable, slot))
        x = y - real(1 / np.float64(beta1) - 1) * z_minus_y
        # Of no dimensions, numpy's results are numbers.
        xp = backend_for(variable.device).xp
        return xp.asarray(x).astype(variable.dtype, copy=False)

    def _counter_ranges(self) -> Mapping[str, Range]:
        not_negative = Range(0.0, np.inf, np.float64)
        return {"weight_sum": not_negative, "largest_learning_rate": not_negative}

    def _this_weight(self) -> np.float64:
        """Returns the square of the largest learning rate so far: how much `z` of this step counts.

        So the steps of a warm-up count less.
        """
        [learning_rate] = self._given("learning_rate")
        return max(learning_rate, self._count("largest_learning_rate")) ** 2

    def _weight(self) -> np.float64:
        """Returns the weight of `z` in the average of all steps with this one."""
        weight = self._this_weight()
        # Of learning rates that were all 0, nothing counts.
        return weight / (self._count("weight_sum") + weight) if weight else weight

    def _count_in_group(self) -> None:
        [learning_rate] = self._given("learning_rate")
        self._counter("weight_sum").add(self._this_weight())
        self._counter("largest_learning_rate").raise_to(learning_rate)
