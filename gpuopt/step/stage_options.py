"""Options that add a stage to each step of an optimizer, with scalars by the count of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.device import Device
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.state import Range, State
from gpuopt.variables.variable import Variable


class StageOfStep(ABC):
    """A stage with the scalars of one step."""

    @abstractmethod
    def join(
        self, rule: UpdateRule, dtype: np.dtype[Any], scalars: Sequence[Scalars]
    ) -> tuple[UpdateRule, Sequence[Scalars]]:
        """Returns the form of a rule that has the stage, and its scalars.

        Args:
            rule: The rule of the variables.
            dtype: The variables' type.
            scalars: The rule's, for each group.
        """


class StageOption(ABC):
    """Such an option, with the value that an optimizer got for it.

    Attributes:
        name: The argument's name.
        counter: The name of the optimizer's variable that counts its steps, in float64.
        range: The values that the count can have.
    """

    name: ClassVar[str]
    counter: ClassVar[str]
    range: ClassVar[Range] = Range(0.0, 2.0**53, np.float64)

    @classmethod
    @abstractmethod
    def checked(cls, given: Any, optimizer: Any) -> StageOption:
        """Returns the option for an argument of a `RuleOptimizer`.

        Raises:
            TypeError, ValueError: the value is not allowed, or not with other options.
        """

    @abstractmethod
    def described(self) -> Any:
        """Returns the value that a checkpoint shows to its reader."""

    def first_number(self, variable: Variable) -> int:
        """Returns the number of a variable's first element, for stages of the gradient.

        It is at least 0 and less than 2^62. By default, it is 0.
        """
        return 0

    @abstractmethod
    def of_step(self, steps: int) -> StageOfStep:
        """Returns the stage of the next step after some number of steps."""

    def create_counter(self, state: State, device: Device) -> None:
        """Makes the counter, if it is missing."""
        if state.other(self.counter) is None:
            state.create_host_scalar(self.counter, np.float64(0), device)

    def count(self, state: State) -> None:
        """Counts a step, after its updates."""
        state.host_scalar(self.counter).add(1)

    def of_next_step(self, state: State) -> StageOfStep:
        return self.of_step(int(state.host_scalar(self.counter).numpy()))
