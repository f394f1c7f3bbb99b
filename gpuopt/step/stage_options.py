"""Options that add a stage to each step of an optimizer, with scalars by the count of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gpuopt.device import Device
from gpuopt.rules.stage import Stage
from gpuopt.state.state import Range, State
from gpuopt.variables.variable import Variable


class StageOption(ABC):
    """Such an option, with the value that an optimizer got for it.

    Attributes:
        name: The argument's name.
        stage: The stage.
        counter: The name of the optimizer's variable that counts its steps, in float64.
        range: The values that the count can have.
        meaning: A text for its reader.
        default: Of no stage.
        alone: See `gpuopt.optimizers.base.declared.Option`, also for the next two.
        by_hooks: Of a hook that updates one variable at a time: why it does without the stage.
        in_torch: Why torch's optimizers cannot continue a run that has it.
    """

    name: ClassVar[str]
    meaning: ClassVar[str]
    default: ClassVar[None] = None
    alone: ClassVar[Any] = None
    stage: ClassVar[Stage]
    counter: ClassVar[str]
    range: ClassVar[Range] = Range(0.0, 2.0**53, np.float64)
    by_hooks: ClassVar[str] = "which has no such stage"
    in_torch: ClassVar[str] = "torch has no such stage"

    @classmethod
    @abstractmethod
    def checked(cls, given: Any, optimizer: Any) -> StageOption:
        """Returns the option for an argument of a `RuleOptimizer`.

        Raises:
            TypeError, ValueError: the value is not allowed, or not with other options.
        """

    def check(self, variables: Sequence[Variable]) -> None:  # noqa: B027  # most refuse none
        """Raises ValueError for variables that are new to the optimizer and cannot have it."""

    @abstractmethod
    def described(self) -> Any:
        """Returns the value that a checkpoint shows to its reader."""

    def joins(self, dtype: np.dtype[Any]) -> bool:
        """Whether updates of variables of a type have the stage: of all types if it has slots."""
        return True

    @abstractmethod
    def scalars(self, steps: int) -> Mapping[str, Any]:
        """Returns numbers for the stage's scalars, in the next step after some number of steps."""

    def create_counter(self, state: State, device: Device) -> None:
        """Makes the counter, if it is missing."""
        if state.other(self.counter) is None:
            state.create_host_scalar(self.counter, np.float64(0), device)

    def count(self, state: State) -> None:
        """Counts a step, after its updates."""
        state.host_scalar(self.counter).add(1)

    def scalars_of_next_step(self, state: State) -> Mapping[str, Any]:
        return self.scalars(int(state.host_scalar(self.counter).numpy()))
