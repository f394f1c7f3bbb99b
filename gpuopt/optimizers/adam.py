"""Adam."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.indexed_slices import IndexedSlices
from gpuopt.optimizer import OnNonfinite
from gpuopt.optimizers.rule_optimizer import Hyperparameter, RuleOptimizer
from gpuopt.update_rule import update_rule
from gpuopt.variable import Variable

_logger = logging.getLogger("gpuopt")

# Tables from this height on make the cost of moving every row worth a hint.
_TALL_TABLE_ROWS = 1_000_000


@update_rule
def adam(
    var: Any, grad: Any, m: Any, v: Any, *, step_size: Any, beta1: Any, beta2: Any, epsilon: Any
) -> None:
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    var -= step_size * m / (np.sqrt(v) + epsilon)


class AdamOptimizer(RuleOptimizer):
    """Adam (Kingma & Ba 2015), in the form at the end of its section 2.

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g^2 - v)
        w -= learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)

    So epsilon is the paper's "epsilon hat", added after bias correction. A sparse gradient moves
    every row of the variable, as TensorFlow does: `m` and `v` decay everywhere, and rows without a
    gradient keep moving while their `m` lasts. `LazyAdamOptimizer` leaves those rows alone.

    `beta1^t` and `beta2^t` are the variables `beta1_power` and `beta2_power`, float32 whatever the
    type of the weights, shared by all variables and multiplied once in a step.
    """

    rule = adam
    touches_all_rows = True

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        *,
        on_nonfinite: OnNonfinite = "propagate",
    ) -> None:
        """Keeps the hyperparameters; each may be a function without arguments.

        Args:
            learning_rate: Step size.
            beta1: Decay of the gradient's average `m`.
            beta2: Decay of the squared gradient's average `v`.
            epsilon: Keeps the division finite.
            use_locking: Updates of one variable by several threads take turns.
            name: The optimizer's name, and its slots'.
            on_nonfinite: "propagate", "skip" or "raise": for gradients with NaN; see `Optimizer`.
        """
        super().__init__(
            use_locking,
            name,
            on_nonfinite=on_nonfinite,
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        self._hint_given = False

    def _initial_slot_values(self) -> Mapping[str, float]:
        return {"m": 0.0, "v": 0.0}

    def _all_non_slot_names(self) -> list[str]:
        return ["beta1_power", "beta2_power"]

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        for beta in ("beta1", "beta2"):
            if self._get_non_slot_variable(f"{beta}_power") is None:
                first = min(var_list, key=lambda variable: variable.name)
                value = np.float32(self._call_if_callable(self._hyperparameters[beta]))
                self._create_host_scalar(value, f"{beta}_power", first)
        super()._create_slots(var_list)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        beta1_power, beta2_power = (real(power.numpy()) for power in self._beta_powers())
        bias_correction = np.sqrt(1 - beta2_power) / (1 - beta1_power)
        return {
            "step_size": real(self._hyper("learning_rate")) * bias_correction,
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(self._hyper("epsilon")),
        }

    def _apply_rule_sparse(self, grad: IndexedSlices, var: Variable) -> None:
        if self.touches_all_rows and not self._hint_given and var.shape[0] >= _TALL_TABLE_ROWS:
            self._hint_given = True
            _logger.warning(
                'AdamOptimizer moves all %d rows of "%s" for a gradient of %d rows, as TensorFlow '
                "does; LazyAdamOptimizer updates only the rows of the gradient",
                var.shape[0],
                var.name,
                grad.indices.shape[0],
            )
        super()._apply_rule_sparse(grad, var)

    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        for power, beta in zip(self._beta_powers(), ("beta1", "beta2"), strict=True):
            # A product is not one of the variable's locked operations, so it takes the lock itself.
            with power.identity.lock:
                power.assign(power.numpy() * np.float32(self._hyper(beta)))

    def _beta_powers(self) -> tuple[Variable, Variable]:
        return self._non_slots["beta1_power"], self._non_slots["beta2_power"]
