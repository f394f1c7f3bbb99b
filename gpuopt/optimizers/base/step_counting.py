"""Optimizers that count their steps, as those of torch and optax do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gpuopt.device import Device
from gpuopt.optimizers.base.all_digits import AllDigitsOptimizer
from gpuopt.optimizers.base.own_counts import in_count
from gpuopt.state.counts import RANGE_OF_STEP
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import Range
from gpuopt.step.hooks import undoable
from gpuopt.variables.variable import Variable

# As far as float64 counts.
_MOST_STEPS = 2.0**53


class StepCountingOptimizer(AllDigitsOptimizer):
    """Base of the optimizers whose steps depend on how many there were.

    Attributes:
        counters: Numbers of float64 that change with the steps, and what they start with. `step` is
            the number of steps so far, of all variables; of the others, each group has its own. An
            optimizer with `own_counts` has these instead, of the same names.
    """

    _unlisted = frozenset(["counters"])
    counters: ClassVar[Mapping[str, float]] = {"step": 0.0}

    def _all_non_slot_names(self) -> list[str]:
        return [] if self.own_counts else list(self.counters)

    def _names_left_out(self) -> Sequence[str]:
        return list(self.counters) if self.own_counts else ()

    def _non_slot_names_of_groups(self) -> list[str]:
        if self.own_counts:
            return []
        return [_name_in(each.group_name, name) for each in self.groups for name in self._of_groups]

    def _state_ranges(self) -> Mapping[str, Range]:
        step = RANGE_OF_STEP if self.own_counts else Range(0.0, _MOST_STEPS, np.float64)
        of_counters = {**self._counter_ranges(), "step": step}
        of_groups = {
            _name_in(each.group_name, name): of_counters[name]
            for each in self.groups
            for name in self._of_groups
        }
        return {**super()._state_ranges(), **of_counters, **of_groups}

    def _counter_ranges(self) -> Mapping[str, Range]:
        """Returns the numbers that the counters beside `step` can be."""
        return {}

    @property
    def _of_groups(self) -> list[str]:
        """The names of the counters that each group has."""
        return [name for name in self.counters if name != "step"]

    def _counts_of_all(
        self, numbers: Mapping[str, Any], name: str, variable: Variable | None
    ) -> Mapping[str, Any]:
        of_group = None
        for number, given in enumerate(self.groups, 1):
            is_in = variable is not None and self._grouping.number_of(variable) == number
            of_group = given.group_name if is_in else of_group
        names = [(each, _name_in(of_group, each)) for each in self.own_counts]
        found = {each: numbers.get(own, numbers.get(each)) for each, own in names}
        return {each: value for each, value in found.items() if value is not None}

    def _create_slots(self, var_list: Sequence[Variable]) -> None:
        if self.own_counts:
            super()._create_slots(var_list)
            return
        first = min(var_list, key=lambda variable: variable.name)
        for name, value in self.counters.items():
            self._create_counter(name, value, first.device)
            # A group that is new to a restored state goes on from the numbers of no group.
            now = float(self.state.host_scalar(name).numpy())
            for each in self.groups if name in self._of_groups else ():
                self._create_counter(_name_in(each.group_name, name), now, first.device)
        super()._create_slots(var_list)

    def _create_counter(self, name: str, value: float, device: Device) -> None:
        if self.state.other(name) is None:
            self.state.create_host_scalar(name, np.float64(value), device)

    def _counter(self, name: str) -> HostScalar:
        """Returns a counter of the group whose hyperparameters `_hyper` returns."""
        if self.this_thread.count is not None:
            return self.this_thread.count.all()[name]
        number = self.this_thread.group
        if number and name in self._of_groups:
            name = _name_in(self.groups[number - 1].group_name, name)
        return self.state.host_scalar(name)

    def _count(self, name: str) -> np.float64:
        return np.float64(self._counter(name).numpy())

    def _step(self) -> np.float64:
        """Returns the number of the step that is being made, counted from 1."""
        return self._count("step") + 1

    def _bias_correction(self, beta: str, real: type[np.floating[Any]]) -> np.float64:
        """Returns the sum of the weights of an average's gradients in this step, `1 - beta^t`.

        The rule multiplies by `beta` as rounded to `real`, and so this takes the rounded one.
        """
        return 1 - np.float64(real(self._hyper(beta))) ** self._step()

    def _bias_corrected(self, real: type[np.floating[Any]]) -> dict[str, np.floating[Any]]:
        """Returns the scalars by which a rule like Adam's divides corrected averages.

        With `m' = m / (1 - beta1^t)` and `v' = v / (1 - beta2^t)`, the step is
        `learning_rate * m' / (sqrt(v') + epsilon)`.
        """
        learning_rate, epsilon = self._given("learning_rate", "epsilon")
        root = np.sqrt(self._bias_correction("beta2", real))
        return {
            "step_size": real(learning_rate * root / self._bias_correction("beta1", real)),
            "beta1": real(self._hyper("beta1")),
            "beta2": real(self._hyper("beta2")),
            "epsilon": real(epsilon * root),
        }

    @undoable
    def _finish(self, update_ops: list[Any], name_scope: str) -> None:
        if self.own_counts:
            for count in self.this_thread.counted:
                if count.beside:
                    in_count(self, count, self._count_in_group)
                count.add(1)
            return
        if self._of_groups:
            for number in range(1 + len(self.groups)):
                self._in_group(number, self._count_in_group)
        self._counter("step").add(1)

    def _count_in_group(self) -> None:
        """Changes the counters of a group after a step, but not yet `step`."""


def _name_in(group_name: str | None, counter: str) -> str:
    return f"{counter}/{group_name}"
