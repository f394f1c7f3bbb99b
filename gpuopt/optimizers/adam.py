"""Adam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    Hyperparameter,
    RuleOptimizer,
    ours,
    undoable,
    update_rule,
)
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import Range
from gpuopt.variables.variable import Variable

# Of the numbers that a power of beta can be.
_LARGEST_BELOW_1 = float(np.nextafter(np.float32(1), np.float32(0)))


@update_rule(cuda=ours("adam.cuh", "Adam"), squares=("v",))
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

    Args:
        learning_rate: Step size.
        beta1: Decay of the gradient's average `m`.
        beta2: Decay of the squared gradient's average `v`.
        epsilon: Keeps the division finite.
        use_locking, name, on_nonfinite: See `Optimizer`.
    """

    rule = adam
    rule_of_other_rows: ClassVar[UpdateRule | None] = adam
    instead_of_all_rows = "LazyAdamOptimizer"
    # The hyperparameters whose powers correct the bias of averages that begin at 0.
    betas: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def __init__(
        self,
        learning_rate: Hyperparameter = 0.001,
        beta1: Hyperparameter = 0.9,
        beta2: Hyperparameter = 0.999,
        epsilon: Hyperparameter = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        # The powers of `betas`, once they are made.
        self._powers: list[HostScalar] = []

    def _all_non_slot_names(self) -> list[str]:
        return [f"{beta}_power" for beta in self.betas]

    def _state_ranges(self) -> Mapping[str, Range]:
        ranges = dict(super()._state_ranges())
        for beta in self.betas:
            value = self.hyperparameters[beta]
            # A beta may be below 0: negative momentum (Gidel et al. 2019). After many steps, the
            # power of any other is 0. At 1, the step would be divided by 0.
            is_usual = not callable(value) and 0 <= np.float32(value) < 1
            low, high = (0.0, _LARGEST_BELOW_1) if is_usual else (-1.0, 1.0)
            ranges[f"{beta}_power"] = Range(low, high, np.float32)
        return ranges

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        for beta in self.betas:
            if self._get_non_slot_variable(f"{beta}_power") is None:
                first = min(var_list, key=lambda variable: variable.name)
                value = np.float32(self._call_if_callable(self.hyperparameters[beta]))
                self.state.create_host_scalar(f"{beta}_power", value, first.device)
        self._powers = [self.state.host_scalar(name) for name in self._all_non_slot_names()]
        super()._create_slots(var_list)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        given = self.this_thread.hyperparameters
        beta1_power, beta2_power = (real(power.numpy()) for power in self._powers)
        bias_correction = np.sqrt(1 - beta2_power) / (1 - beta1_power)
        return {
            "step_size": real(given["learning_rate"]) * bias_correction,
            "beta1": real(given["beta1"]),
            "beta2": real(given["beta2"]),
            "epsilon": real(given["epsilon"]),
        }

    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        given = self.this_thread.hyperparameters
        for power, beta in zip(self._powers, self.betas, strict=True):
            power.multiply(np.float32(given[beta]))
