"""Options of optimizers that are stages of their steps, with numbers by the count of steps."""

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
            rule: What updates variables.
            dtype: Theirs.
            scalars: The rule's, for each group.
        """


class StageOption(ABC):
    """What an optimizer is given for such an option.

    Attributes:
        name: The argument's.
        counter: The optimizer's own variable that counts its steps: float64, as far as that counts.
        range: The numbers that the count can be.
    """

    name: ClassVar[str]
    counter: ClassVar[str]
    range: ClassVar[Range] = Range(0.0, 2.0**53, np.float64)

    @classmethod
    @abstractmethod
    def checked(cls, given: Any, optimizer: Any) -> StageOption:
        """Returns the option as it is given to a `RuleOptimizer`.

        Raises:
            TypeError, ValueError: it is refused.
        """

    @abstractmethod
    def described(self) -> Any:
        """Returns what a checkpoint mentions for its reader."""

    def first_number(self, variable: Variable) -> int:
        """Returns the number from which on its stage numbers the elements of a variable.

        It is at least 0, and below 2^62. The same for all variables unless a class says otherwise.
        """
        return 0

    @abstractmethod
    def of_step(self, steps: int) -> StageOfStep:
        """Returns the stage of the step after so many others."""

    def create_counter(self, state: State, device: Device) -> None:
        """Makes the count of steps, if it is missing."""
        if state.other(self.counter) is None:
            state.create_host_scalar(self.counter, np.float64(0), device)

    def count(self, state: State) -> None:
        """Counts a step, after its updates."""
        state.host_scalar(self.counter).add(1)

    def of_next_step(self, state: State) -> StageOfStep:
        return self.of_step(int(state.host_scalar(self.counter).numpy()))
