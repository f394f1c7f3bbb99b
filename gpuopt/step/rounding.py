"""Stochastic rounding of bfloat16 variables and their slots, as a part of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.device import Device
from gpuopt.rules.rounded import BFLOAT16, key_of_step, rounded
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.state import Range, State
from gpuopt.variables.variable import Variable

if TYPE_CHECKING:
    from gpuopt.state.host_scalar import HostScalar

# The optimizer's own variable that counts its steps: float64, as far as that counts.
ROUNDED_STEPS = "rounded_steps"
_MOST_STEPS = 2.0**53


class StochasticRounding:
    """How an optimizer rounds what it writes to bfloat16 variables and slots.

    Attributes:
        seed: Of the random bits.
        has_own_slots: Whether slots are bfloat16 beside variables of any type.
        ranges: The numbers that the count of steps can be.
    """

    ranges: ClassVar[Mapping[str, Range]] = {ROUNDED_STEPS: Range(0.0, _MOST_STEPS, np.float64)}

    def __init__(self, seed: int, has_own_slots: bool) -> None:
        self.seed = seed
        self.has_own_slots = has_own_slots

    def rounds(self, dtype: np.dtype[Any]) -> bool:
        """Whether something is rounded in updates of variables of this type."""
        return self.has_own_slots or bool(dtype == BFLOAT16)

    def create_counter(self, state: State, device: Device) -> None:
        """Makes the count of steps, if it is missing."""
        if state.other(ROUNDED_STEPS) is None:
            state.create_host_scalar(ROUNDED_STEPS, np.float64(0), device)

    def count(self, state: State) -> None:
        """Counts a step, after its updates."""
        state.host_scalar(ROUNDED_STEPS).add(1)

    def of_step(self, state: State) -> StepRounding:
        """Returns the rounding of the next step."""
        return StepRounding(self, state.host_scalar(ROUNDED_STEPS))


class StepRounding:
    """The rounding of one step."""

    def __init__(self, rounding: StochasticRounding, steps: HostScalar) -> None:
        self.rounds = rounding.rounds
        self._key = key_of_step(rounding.seed, int(steps.numpy()))

    def join(
        self, rule: UpdateRule, scalars: Sequence[Scalars]
    ) -> tuple[UpdateRule, list[Scalars]]:
        """Returns the form of a rule that is rounded, and its scalars."""
        return rounded(rule), [{**each, **self._key} for each in scalars]


def check_not_float16(variables: Sequence[Variable]) -> None:
    """Raises ValueError for variables of the 16-bit type that is not rounded stochastically."""
    for variable in variables:
        if variable.dtype == np.float16:
            raise ValueError(
                f'stochastic_rounding: "{variable.name}" is float16, and only bfloat16 variables '
                'are rounded so: use masters="float32", or make it bfloat16'
            )
