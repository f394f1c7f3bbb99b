"""Per-step values that depend on the step count: scalars, averaging weights, stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.rules.staged import staged
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.averages import StepAverages
from gpuopt.step.known import Batch
from gpuopt.step.stage_options import StageOption
from gpuopt.variables.variable import Variable

# The scalars of all groups, by the type that rules compute in.
ScalarsByType = dict[type["np.floating[Any]"], Sequence[Scalars]]


class FollowsSteps(ABC):
    """A hyperparameter that follows a counter: a `Schedule`.

    Attributes:
        name: The function that has made it.
        global_step: The variable that is followed.
    """

    name: str
    global_step: Variable

    @property
    @abstractmethod
    def _is_ours(self) -> bool:
        """Whether its values follow from the counter alone: a subclass may compute others."""


class StepNumbers(NamedTuple):
    """The numbers of one step, for one count of the steps before it.

    Attributes:
        scalars: See `ThisThread.scalars`.
        averages: The averages that the optimizer moves; None if there are none.
        stages: The options that are stages, with the scalars of each.
    """

    scalars: ScalarsByType
    averages: StepAverages | None
    stages: Sequence[tuple[StageOption, Mapping[str, Any]]]

    def join(
        self, rule: UpdateRule, batch: Batch, is_averaged: bool, scalars: Sequence[Scalars]
    ) -> tuple[UpdateRule, Sequence[Scalars]]:
        """Returns the form of a rule that has all stages but clipping, and its scalars.

        Args:
            rule: The rule of the batch.
            batch: Variables of one device and dtype.
            is_averaged: Whether the rule moves their averages.
            scalars: The rule's, for each group.
        """
        if is_averaged and self.averages is not None:
            rule, scalars = self.averages.join(rule, batch, scalars)
        for option, given in self.stages:
            if option.joins(batch.dtype):
                own = {name: batch.real(value) for name, value in given.items()}
                rule, scalars = staged(rule, option.stage), [{**each, **own} for each in scalars]
        return rule, scalars
