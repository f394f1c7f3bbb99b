"""Moving averages that follow a step: in the launch that updates a variable where that can be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gpuopt.backends import Target
from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.codecs import Codecs, codec_of
from gpuopt.device import Device
from gpuopt.rules.averaged import AVERAGE_WEIGHT, averaged
from gpuopt.rules.scaled import UNSCALE, scaled
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import Masters, kept_dtype
from gpuopt.step.known import KnownGroups
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable, as_variable, known_identity

TargetOf = Callable[[Variable], tuple[Target, list[Identity], Codecs]]


class AverageWeights:
    """The weights of new values in one move of averages."""

    def __init__(
        self,
        weights: Sequence[np.floating[Any]],
        records: Mapping[Device, StepRecord] = MappingProxyType({}),
    ) -> None:
        """Takes the weights, of float32.

        Args:
            weights: One for each count of steps that GPUs may choose, the largest count first.
            records: By device: averages on one that refuses the step stay as they are.
        """
        self._weights = weights
        self._records = records

    def join(
        self, rule: UpdateRule, device: Device, real: type[np.floating[Any]]
    ) -> tuple[UpdateRule, Sequence[Scalars], StepRecord]:
        """Returns a rule, its scalars and the record, for averages on one device.

        Args:
            rule: Takes the weight alone.
            device: Where the averages are.
            real: What the rule computes in.
        """
        scalars: list[Scalars] = [{AVERAGE_WEIGHT: real(weight)} for weight in self._weights]
        record = self._records.get(device, NOTHING_KNOWN)
        if len(set(self._weights)) == 1:
            return rule, scalars[:1], record
        return scaled(rule), [{**each, UNSCALE: real(1)} for each in scalars], record


class MovingAverages:
    """Averages of variables, as a step moves them: what `ExponentialMovingAverage` is.

    Attributes:
        version: Grows when an average is dropped: plans for updates keep the averages' arrays.
    """

    version: int

    def average(self, var: Any) -> Variable | None:
        """Returns the variable that holds the average of `var`, or None."""
        raise NotImplementedError

    def decay_now(self, counter: Variable | None = None) -> np.floating[Any]:
        """Returns the weight of old averages.

        Args:
            counter: A variable that is to be counted up before averages are moved; or None.
        """
        raise NotImplementedError

    def follows(self, counter: Variable | None) -> bool:
        """Whether the weight of old averages is always the same, or follows from a counter alone.

        Args:
            counter: What counts the steps; None if nothing does.
        """
        raise NotImplementedError

    def start(self, variables: Sequence[Variable], values: Sequence[Variable]) -> list[Variable]:
        """Makes the averages that are missing, and returns them.

        Args:
            variables: What the averages belong to.
            values: What they are of: the variables, or their master copies.
        """
        raise NotImplementedError

    def move(
        self, variables: Sequence[Variable], values: Sequence[Variable], weights: AverageWeights
    ) -> None:
        """Moves averages towards the present values, as a part of a step.

        Args:
            variables: Those that have an average.
            values: See `start`.
            weights: Those of the new values, in this step.
        """
        raise NotImplementedError

    def forget(self, averages: Iterable[Variable]) -> None:
        """Drops averages."""
        raise NotImplementedError


class FollowingAverages:
    """The averages that an optimizer moves in its steps.

    Attributes:
        moving: Theirs.
        known: The cache of groups whose plans also write averages.
    """

    def __init__(self, moving: MovingAverages, masters: Masters | None) -> None:
        """Keeps the averages.

        Args:
            moving: Theirs.
            masters: What master copies of 16-bit variables are; None if there are none.
        """
        self.moving = moving
        self.known = KnownGroups()
        self._masters = masters

    def joining(self, variables: Sequence[Any]) -> list[bool]:
        """Says of which variables the average is moved by the rule that updates them.

        It is not where it is not made yet, and where a constraint comes between.

        Args:
            variables: As the caller passed them, of dense gradients.
        """
        return [known_identity(each) is not None and self._joins(each) for each in variables]

    def _joins(self, given: Any) -> bool:
        variable = as_variable(given)
        return variable.constraint is None and self.moving.average(variable) is not None

    def bytes_moved(self, variable: Variable, is_sparse: bool) -> int:
        """Returns the bytes that moving a variable's average reads and writes, once it is made.

        Args:
            variable: What a step has updated.
            is_sparse: Whether its gradient was IndexedSlices: all rows of the average move.
        """
        average = self.moving.average(variable)
        if average is None:
            return 0
        # What the rule does not move reads the values anew.
        is_moved_alone = is_sparse or not self._joins(variable)
        value = kept_dtype(variable.dtype, self._masters).itemsize * variable.size
        return 2 * average.nbytes + (value if is_moved_alone else 0)

    def target(
        self, target_of: TargetOf, variable: Variable
    ) -> tuple[Target, list[Identity], Codecs]:
        """Returns a variable's target with its average before its slots; see `averaged`."""
        target, [own, *identities], codecs = target_of(variable)
        average = self.moving.average(variable)
        assert average is not None, "it was there when the step began"
        return (
            target._replace(slots=[average.unread_storage, *target.slots]),
            [own, average.identity, *identities],
            Codecs(codecs.var, (codec_of(average.dtype, codecs.var.real), *codecs.slots)),
        )

    def of(self, variables: Iterable[Variable]) -> list[Variable]:
        """Lists the averages that some variables have so far."""
        found = [self.moving.average(variable) for variable in variables]
        return [average for average in found if average is not None]

    def of_step(self, counter: Variable | None) -> StepAverages:
        """Returns the averages as one step moves them.

        Args:
            counter: What counts the step, after the update.
        """
        return StepAverages(self.moving, self.moving.decay_now(counter), self._masters)


class StepAverages:
    """The averages of one step.

    Attributes:
        decay: The weight of old averages.
    """

    def __init__(
        self, moving: MovingAverages, decay: np.floating[Any], masters: Masters | None
    ) -> None:
        self._moving = moving
        self.decay = decay
        self._masters = masters
        self._made: list[Variable] = []

    def joined(self, rule: UpdateRule, dtype: np.dtype[Any]) -> UpdateRule:
        """Returns the form of a rule that also moves the averages of variables of a dtype."""
        return averaged_rule(rule, dtype, self._masters)

    def start(self, variables: Sequence[Variable], values: Sequence[Variable]) -> None:
        """Makes the averages that are missing; see `MovingAverages.start`."""
        self._made += self._moving.start(variables, values)

    def follow(
        self,
        variables: Sequence[Variable],
        values: Sequence[Variable],
        of_counts: Sequence[StepAverages],
        records: Mapping[Device, StepRecord],
    ) -> None:
        """Moves the averages of variables that are updated.

        Args:
            variables: What the step has updated.
            values: See `MovingAverages.start`.
            of_counts: These averages, for each count of steps that a GPU may have.
            records: By device; see `StepRecord`.
        """
        weights = AverageWeights([1 - each.decay for each in of_counts], records)
        self._moving.move(variables, values, weights)

    def forget(self, devices: Collection[Device] | None) -> None:
        """Drops the averages that the step has made on devices that refuse it; None for all."""
        self._moving.forget(
            each for each in self._made if devices is None or each.device in devices
        )


def averaged_rule(rule: UpdateRule, dtype: np.dtype[Any], masters: Masters | None) -> UpdateRule:
    """Returns the form of a rule that also moves the averages of variables of a dtype."""
    kept = kept_dtype(dtype, masters)
    return averaged(rule, None if kept == compute_type(dtype) else kept)


def following(averages: Any, masters: Masters | None) -> FollowingAverages | None:
    """Returns the averages that an optimizer is given, as it moves them.

    Args:
        averages: As the optimizer is given them.
        masters: What its master copies are, if it has any.

    Raises:
        TypeError: they are something else.
    """
    if averages is None:
        return None
    if not isinstance(averages, MovingAverages):
        raise TypeError(f"averages must be an ExponentialMovingAverage, or None, got {averages!r}")
    return FollowingAverages(averages, masters)
