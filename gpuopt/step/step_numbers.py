"""Per-step values that depend on the step count: scalars, averaging weights, stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.rules.averaged import AVERAGE_WEIGHT
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

    def staged(self, rule: UpdateRule, batch: Batch, is_averaged: bool) -> UpdateRule:
        """Returns the form of a rule that has all stages but clipping.

        Args:
            rule: The rule of the batch.
            batch: Variables of one device and dtype.
            is_averaged: Whether the rule moves their averages.
        """
        if is_averaged and self.averages is not None:
            rule = self.averages.joined(rule, batch.dtype)
        for option, _ in self.stages:
            if option.joins(batch.dtype):
                rule = staged(rule, option.stage)
        return rule

    def of_stages(self, batch: Batch, is_averaged: bool) -> Scalars:
        """Returns the scalars of these stages."""
        found: dict[str, Any] = {}
        if is_averaged and self.averages is not None:
            found[AVERAGE_WEIGHT] = batch.real(1 - self.averages.decay)
        for option, given in self.stages:
            if option.joins(batch.dtype):
                found |= {name: batch.real(value) for name, value in given.items()}
        return found
