"""Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from gpuopt.optimizers.base import (
    Additions,
    CatchUpOption,
    Hyperparameter,
    HyperparameterName,
    Movement,
    RuleOptimizer,
    Unnamed,
    undoable,
    update_rule,
)
from gpuopt.optimizers.base.catching_up import CATCH_UP
from gpuopt.optimizers.base.hyperparameters import Hyperparameters
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.counts import RANGE_OF_STEP, STEP
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import Range
from gpuopt.variables.variable import Variable

_SMALLEST = float(np.finfo(np.float32).tiny)
# Of the numbers that a power of beta can be.
_LARGEST_BELOW_1 = float(np.nextafter(np.float32(1), np.float32(0)))


# By which slots decay where there is no gradient.
DECAYS = {"m": "beta1", "v": "beta2"}


@update_rule(
    squares=("v",),
    unnamed=Unnamed(DECAYS, Movement("step_size", "m", "v", "epsilon")),
)
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

    So epsilon is the paper's "epsilon hat": it is added to the root of `v` itself, and not of the
    bias-corrected `v`. A sparse gradient moves every row of the variable, as in TensorFlow: `m` and
    `v` decay everywhere, and rows without a gradient keep moving while their `m` lasts.
    `LazyAdamOptimizer` leaves those rows alone.

    `beta1^t` and `beta2^t` are the variables `beta1_power` and `beta2_power`, float32 whatever the
    type of the weights, shared by all variables and multiplied once in a step. A group that has a
    beta of its own has a power of its own, as if its beta had always been what it is: `t` counts
    the steps of the optimizer.
    """

    rule = adam
    rule_of_other_rows: ClassVar[UpdateRule | None] = adam
    instead_of_all_rows = "LazyAdamOptimizer"
    _unlisted = frozenset(["betas"])
    # The hyperparameters whose powers correct the bias of averages that begin at 0.
    betas: ClassVar[tuple[HyperparameterName, ...]] = ("beta1", "beta2")

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, "Step size."] = 0.001,
        beta1: Annotated[Hyperparameter, "Decay of the gradient's average `m`."] = 0.9,
        beta2: Annotated[Hyperparameter, "Decay of the squared gradient's average `v`."] = 0.999,
        epsilon: Annotated[Hyperparameter, "Keeps the division finite."] = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        *,
        catch_up: Annotated[CatchUpOption, CATCH_UP] = False,
        **common: Unpack[Additions],
    ) -> None:
        super().__init__(
            {"use_locking": use_locking, "name": name, **common},
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
        )
        self._set_catch_up(catch_up)
        # For variables in no group, and then for each group: the powers of `betas`.
        self._powers: list[list[HostScalar]] = []

    def _all_non_slot_names(self) -> list[str]:
        return [] if self.own_counts else [_power_name(beta) for beta in self.betas]

    def _names_left_out(self) -> Sequence[str]:
        return [_power_name(beta) for beta in self.betas] if self.own_counts else []

    def _counts_of_all(
        self, numbers: Mapping[str, Any], name: str, variable: Variable | None
    ) -> Mapping[str, Any]:
        powers = [numbers.get(_power_name(beta)) for beta in self.betas]
        known = [float(power) for power in powers if power is not None]
        return {STEP: self._count_steps(known)} if len(known) == len(powers) else {}

    def _non_slot_names_of_groups(self) -> list[str]:
        if self.own_counts:
            return []
        return [
            _power_name(beta, given.group_name)
            for given in self.groups
            for beta in self.betas
            if beta in given.own
        ]

    def _state_ranges(self) -> Mapping[str, Range]:
        ranges = dict(super()._state_ranges())
        if self.own_counts:
            ranges[STEP] = RANGE_OF_STEP
        for given in (self.hyperparameters, *self.groups):
            for beta in self.betas:
                value = given[beta]
                # A beta may be below 0: negative momentum (Gidel et al. 2019). After many steps,
                # the power of any other is 0. At 1, the step would be divided by 0.
                is_usual = not callable(value) and 0 <= np.float32(value) < 1
                low, high = (0.0, _LARGEST_BELOW_1) if is_usual else (-1.0, 1.0)
                ranges[_power_name(beta, given.group_name)] = Range(low, high, np.float32)
        return ranges

    def _has_state(self, name: str) -> bool:
        return name in self.betas and not self.own_counts

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        if self.own_counts:
            super()._create_slots(var_list)
            return
        first = min(var_list, key=lambda variable: variable.name)
        powers = []
        for beta in self.betas:
            value = self.hyperparameters[beta]
            if self.state.other(_power_name(beta)) is None:
                now = np.float32(self._call_if_callable(value))
                self.state.create_host_scalar(_power_name(beta), now, first.device)
            powers.append(self.state.host_scalar(_power_name(beta)))
        every = [powers]
        for given in self.groups:
            every.append(
                [
                    self._power_of_group(beta, given, powers) if beta in given.own else power
                    for beta, power in zip(self.betas, powers, strict=True)
                ]
            )
        # At once: a step of another thread reads them, and an error may end this.
        self._powers = every
        super()._create_slots(var_list)

    def _power_of_group(
        self, beta: HyperparameterName, given: Hyperparameters, powers: Sequence[HostScalar]
    ) -> HostScalar:
        """Returns a group's power of a beta, made if a restored state is of another grouping."""
        name = _power_name(beta, given.group_name)
        if self.state.other(name) is None:
            steps = self._count_steps([float(power.scalar()) for power in powers])
            beta_now = np.float64(np.float32(self._call_if_callable(given[beta])))
            now = np.float32(beta_now ** (steps + 1))
            self.state.create_host_scalar(name, now, powers[0].device)
        return self.state.host_scalar(name)

    def _count_steps(self, powers: Sequence[float]) -> int:
        """Returns how many steps the optimizer has made, as its powers tell.

        Args:
            powers: Those of `betas`, of no group.

        Raises:
            ValueError: they do not tell, as the betas are functions.
        """
        given = zip(powers, (self.hyperparameters[beta] for beta in self.betas), strict=True)
        numbers = [
            (
                float(np.float32(self._call_if_callable(beta))),
                power,
                not callable(beta),
            )
            for power, beta in given
        ]
        if all(power == beta for beta, power, _ in numbers):
            return 0
        known = [(beta, power) for beta, power, is_fixed in numbers if is_fixed and 0 < beta < 1]
        if not known:
            names = " and ".join(map(_power_name, self.betas))
            raise ValueError(
                f"{names} do not tell how many steps {self.get_name()} has made, as the betas are "
                "functions; so a group that is new cannot have a beta of its own, nor can each "
                "variable have a count"
            )
        beta, power = max(known)
        return count_steps(power, beta)

    def _scalars(self, real: type[np.floating[Any]]) -> Mapping[str, np.floating[Any]]:
        this_thread = self.this_thread
        given = this_thread.hyperparameters
        if this_thread.count is not None:
            step = this_thread.count.scalar() + 1
            corrected = [1 - np.float64(real(given[beta])) ** step for beta in self.betas]
            bias_correction = real(np.sqrt(corrected[1]) / corrected[0])
        else:
            powers = self._powers[this_thread.group]
            beta1_power, beta2_power = [real(power.scalar()) for power in powers]
            bias_correction = np.sqrt(1 - beta2_power) / (1 - beta1_power)
        return {
            "step_size": real(given["learning_rate"]) * bias_correction,
            "beta1": real(given["beta1"]),
            "beta2": real(given["beta2"]),
            "epsilon": real(given["epsilon"]),
        }

    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        this_thread = self.this_thread
        if self.own_counts:
            for count in this_thread.counted:
                count.add(1)
            return
        given = this_thread.hyperparameters
        powers, *of_groups = self._powers
        for power, beta in zip(powers, self.betas, strict=True):
            power.multiply(np.float32(given[beta]))
        for powers, own in zip(of_groups, this_thread.of_groups, strict=True):
            # A group has the optimizer's powers of betas that it has not itself.
            for power, beta in zip(powers, self.betas, strict=True):
                if beta in own:
                    power.multiply(np.float32(own[beta]))


def count_steps(power: float, beta: float) -> int:
    """Returns t such that `power = beta^(t + 1)`; any large t will do where the power is 0."""
    if not 0 < beta < 1:
        return 1
    return max(0, round(math.log(max(power, _SMALLEST)) / math.log(beta)) - 1)


def _power_name(beta: str, group_name: str | None = None) -> str:
    return f"{beta}_power" if group_name is None else f"{beta}_power/{group_name}"
