"""Clipping of a step's gradients, by value and to norms over many variables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain, cycle
from typing import Any, Final, Protocol

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.backends.backend import Scalars
from gpuopt.backends.clips import (
    FACTOR_OF_FLOAT64,
    NORM,
    SQUARES,
    ClipForm,
    ClipLimits,
    DenseGradients,
    RuleInputs,
    SparseGradient,
    sums_of,
)
from gpuopt.backends.loss_scaling import Decision, LossScalings
from gpuopt.backends.record import StepRecord
from gpuopt.device import Device
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.clipped import CLIP_FACTOR, bounded, clipped
from gpuopt.rules.scaled import UNSCALE, scaled
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.known import Batch
from gpuopt.step.request import Copies
from gpuopt.variables.identity import Identity

CLIP_NORM: Final = "clip_norm"
CLIP_VALUE: Final = "clip_value"
# In the place of None.
NO_LIMIT = np.float32(np.inf)

# By TensorFlow's formula.
CLIPPING_MAKES_NAN = (
    "clipping to a norm makes finite gradients NaN: the norm is more than its type holds, or it "
    "and clip_norm are 0"
)


class Measurement(Enum):
    """What the norms of a step tell of its gradients."""

    FINITE = auto()
    # Some hold NaN or infinity, or their squares are too large.
    UNKNOWN = auto()
    # All may be finite, and clipping would make them NaN.
    FACTOR_IS_NAN = auto()


# In place of a norm's number: the gradient belongs to no norm.
_NONE = -1


class ClippedPart(Protocol):
    """Gradients of one group of variables; see `RuleUpdates`.

    Attributes:
        rule: What updates the variables, before it clips.
        numbers: Where they stand in the step.
    """

    rule: UpdateRule
    is_sparse: bool
    gradients: Sequence[Any]
    numbers: Sequence[int]

    def arrays(self, batch: Batch) -> Sequence[Any]: ...

    def identities(self) -> Iterable[Identity]: ...


class Measured:
    """The norms of one step, on a device.

    Attributes:
        last_update: When they were computed: see `Updated`.
    """

    def __init__(
        self,
        record: StepRecord,
        device: Device,
        is_decided: bool,
        is_double: bool,
        norms: Mapping[int, int],
    ) -> None:
        """Takes norms that are computed on the current stream.

        Args:
            record: Has them: from `Clips` of the device's backend.
            device: Where they are.
            is_decided: Whether the record is the result of a GPU's decision.
            is_double: See `ClipLimits`.
            norms: By the number of a parameter group with a clipping of its own, or 0, the number
                of its norm; below 0 if it has none.
        """
        self._factors = record.factors
        self._device = device
        self._is_double = is_double
        self._norms = norms
        self.last_update: Any = None
        if is_decided:  # the factors are a part of the loss scale's memory
            self.last_update = record.refused.last_update
        else:
            backend_for(device).record_creation(self)

    def norm(self, group: int) -> Any:
        """Returns a scalar, on a GPU as an array; None if it was not measured."""
        at = self._norms.get(group, _NONE)
        if at == _NONE:
            return None
        real = np.float64 if self._is_double else np.float32
        backend = backend_for(self._device)
        with backend.enter(self):
            norm = self._factors[at, NORM].astype(real)
        backend.note_reading(self, kept=[self._factors])
        return norm


class _Hyperparameters(Protocol):
    """The members of an optimizer's `Hyperparameters` that clipping uses."""

    @property
    def whose(self) -> str: ...

    def __getitem__(self, name: Any) -> Any: ...


class GradientClips:
    """How an optimizer clips gradients, and what norms they had.

    Attributes:
        form: The formula of norms.
        measures_all: Whether the optimizer's own norm is asked for, also where it clips nothing.
        sums_inputs: Whether what measures gradients can also compute what the rule sums.
        every: The hyperparameters of the optimizer and of each group; none if none is to clip.
        measured: The norms of the last step that has measured any.
    """

    def __init__(
        self,
        form: ClipForm,
        measures_all: bool,
        sums_inputs: bool,
        every: Sequence[_Hyperparameters] = (),
    ) -> None:
        self.form = form
        self.measures_all = measures_all
        self.sums_inputs = sums_inputs
        self.every = every
        self.measured: Measured | None = None

    @property
    def takes_norms(self) -> bool:
        """Whether a step takes norms of gradients, by which it also knows that all are finite."""
        most = [each[CLIP_NORM] for each in self.every]
        return self.measures_all or any(each is not NO_LIMIT for each in most)

    def of_step(
        self,
        own: Scalars,
        of_groups: Sequence[Scalars],
        unscale: float | None = None,
    ) -> StepClips:
        """Returns the clipping of one step.

        Args:
            own: The optimizer's hyperparameters, with `clip_norm` and `clip_value`.
            of_groups: Those that each parameter group has of its own. One that has either of the
                two is clipped apart.
            unscale: What all gradients are multiplied by before they are clipped, and that all are
                to be measured; None if they are not scaled.

        Raises:
            ValueError: a function has returned a number below 0 or NaN, or both clip.
        """
        apart = {0: own}
        for number, values in enumerate(of_groups, 1):
            if CLIP_NORM in values or CLIP_VALUE in values:
                apart[number] = values
        limits: list[np.floating[Any]] = []
        norms, shown, bounds = {}, {}, {}
        for number, values in apart.items():
            whose = self.every[number].whose if number else ""
            most, bound = (
                checked_most(f"{whose}{name}", values.get(name, NO_LIMIT))
                for name in (CLIP_NORM, CLIP_VALUE)
            )
            refuse_both(whose, most, bound)
            bounds[number] = bound
            is_asked_for = np.isfinite(most) or (number == 0 and self.measures_all)
            norms[number] = len(limits) if is_asked_for or unscale is not None else _NONE
            shown[number] = norms[number] if is_asked_for else _NONE
            if norms[number] != _NONE:
                limits.append(most)
        for number in norms if limits and self.sums_inputs else ():
            if norms[number] == _NONE:
                norms[number] = len(limits)
                limits.append(NO_LIMIT)
        num_groups = 1 + len(of_groups)
        scale = 1.0 if unscale is None else unscale
        return StepClips(self, limits, norms, shown, bounds, num_groups, scale)


class StepClips:
    """The clipping of one step's gradients."""

    def __init__(
        self,
        clips: GradientClips,
        most: Sequence[np.floating[Any]],
        norms: Mapping[int, int],
        shown: Mapping[int, int],
        bounds: Mapping[int, np.floating[Any]],
        num_groups: int,
        unscale: float,
    ) -> None:
        """Takes what is known before the gradients are.

        Args:
            clips: The optimizer's.
            most: The most of each norm.
            norms: See `Measured`.
            shown: Those of them that were asked for.
            bounds: The largest element, by the same numbers.
            num_groups: The number of parameter groups, with the one of all other variables. A
                larger number is that of a variant of a group: see `RuleOptimizer`.
            unscale: See `ClipLimits`.
        """
        self._clips = clips
        self._most = most
        self._norms = norms
        self._shown = shown
        self._bounds = bounds
        self._is_clipped = any(map(math.isfinite, most))
        self._is_bounded = any(map(math.isfinite, bounds.values()))
        self._num_groups = num_groups
        self._unscale = unscale
        # How a GPU is to decide about the step, and which it is.
        self.decision: Decision | None = None
        self.deciding: Device | None = None
        self._sums_inputs = True
        # Of so many gradients that follow each other, GPUs take the first one's number.
        self._num_alike = 1

    def measure(
        self,
        parts: Sequence[tuple[ClippedPart, Batch]],
        given: Mapping[Device, StepRecord],
        copies: Copies,
        sums_inputs: bool,
    ) -> Mapping[Device, StepRecord]:
        """Has devices compute the norms of gradients, and decide, before anything is written.

        Args:
            parts: All gradients of the step, with what updates them.
            given: By device, the records before this; they have row flags alone.
            copies: See `StepRequest`.
            sums_inputs: Whether the rules' sums are computed, too, where possible.

        Returns:
            What updates read on each device. If a GPU decides, these are the devices that know it.
        """
        self._sums_inputs = sums_inputs
        if not self._most:
            return given
        decision = self.decision
        is_double = np.float64 in [batch.real for _, batch in parts]
        backends = {batch.device: batch.backend for _, batch in parts}
        identities = chain.from_iterable(part.identities() for part, _ in parts)
        if not copies.identities.issuperset(identities):
            copies = Copies()
        are_alike = copies.devices_are_alike
        if decision is not None:  # a GPU does not know of rows that another one has refused
            are_alike &= self.deciding in backends and given.keys().isdisjoint(backends)
        # There are no other sums to be joined with those of a device.
        is_alone = are_alike or (len(backends) == 1 and self.deciding in (None, *backends))
        num_copies = 1 if are_alike else copies.number
        self._num_alike = copies.number if are_alike else 1
        limits = ClipLimits(self._most, self._clips.form, is_double, self._unscale, num_copies)
        knows_scale = is_alone or bool(self._unscale)
        records = {} if decision is not None else dict(given)
        sums, of_rules = [], {}
        for device, backend in backends.items():
            here = [each for each in parts if each[1].device == device]
            dense = [self._dense(*each, knows_scale) for each in here if not each[0].is_sparse]
            sparse = [
                self._sparse(*each)
                for each in here
                if each[0].is_sparse and self._norm_of(each[1].scalar_groups[0]) != _NONE
            ]
            refused = given[device].refused if device in given else None
            if is_alone:
                own = None if decision is None else self._decision_on(device, decision)
                records[device] = backend.clips.measure(dense, sparse, limits, refused, own)
            else:
                of_rules[device] = sums_of(dense)
                decides, num_norms = decision is not None, len(self._most)
                found = backend.clips.sums(dense, sparse, num_norms, refused, decides=decides)
                sums.append(found)
        home = next((each for each in backends if each.kind == "gpu"), Device.cpu)
        if sums:
            joined = self._join(sums, self.deciding or home, backends, limits)
            for device, record in joined.items():
                refused = record.refused
                if decision is None and device in given:
                    refused = given[device].refused
                own_sums = of_rules.get(device, {})
                records[device] = record._replace(refused=refused, sums=own_sums)
        shown = decision is not None, is_double, self._shown
        self._clips.measured = Measured(records[home], home, *shown)
        return records

    def _decision_on(self, device: Device, decision: Decision) -> Decision:
        """Returns how a device decides that has all gradients, as another one does."""
        home = self.deciding
        assert home is not None, "there is a decision"
        before = decision.before if device == home else decision.copies.get(device)
        if before is None:
            with backend_for(home).enter():
                memory = scalings(home).memory(decision.before)
            before = scalings(device).copied(to_device(memory, device))
        return decision._replace(before=before)

    def _join(
        self, sums: Sequence[Any], home: Device, devices: Iterable[Device], limits: ClipLimits
    ) -> dict[Device, StepRecord]:
        """Joins the sums of all on one device, which decides; returns the records of all."""
        brought = [to_device(each, home) for each in sums]
        clips = backend_for(home).clips
        with backend_for(home).enter():
            joined = clips.join(brought, limits, self.decision)
        records = {home: joined}
        for device in devices:
            if device != home:
                memory = to_device(clips.memory(joined), device)
                with backend_for(device).enter():
                    records[device] = backend_for(device).clips.take(joined, memory)
        return records

    def look(self, device: Device, record: StepRecord) -> Measurement:
        """Returns whether gradients are finite, as far as norms show it; the host waits for them.

        Args:
            device: One that has updates.
            record: From `measure`.
        """
        backend = backend_for(device)
        with backend.enter():
            found = backend.to_host(record.factors)
        if not np.isfinite(found[:, FACTOR_OF_FLOAT64]).all():
            return Measurement.FACTOR_IS_NAN
        are_finite = np.isfinite(found[:, SQUARES]).all()
        return Measurement.FINITE if are_finite else Measurement.UNKNOWN

    def stages_around(self, rule: UpdateRule) -> UpdateRule:
        """Returns the form of a rule that unscales and clips its gradient as the step does."""
        # A GPU may skip steps, and so chooses among the scalars of several counts.
        of_counts = self.decision is not None and not self.decision.stops
        if of_counts or self._unscale != 1.0:
            rule = scaled(rule, of_counts=of_counts)
        rule = bounded(rule) if self._is_bounded else rule
        return clipped(rule) if self._is_clipped else rule

    def clip(
        self,
        rule: UpdateRule,
        batch: Batch,
        groups: Sequence[int],
        scalars: Sequence[Scalars],
        record: StepRecord,
    ) -> tuple[UpdateRule, list[Scalars]]:
        """Returns that form of a rule, and its scalars.

        Args:
            rule: What updates the batch.
            batch: Variables of one device and dtype.
            groups: The numbers of the parameter groups that scalars are given for.
            scalars: The rule's of each; if a GPU has decided about the step, for one count of steps
                after the other.
            record: Of the batch's device: see `StepRecord`.
        """
        factors, real = record.factors, batch.real
        staged = self.stages_around(rule)
        names = staged.scalars[len(rule.scalars) :]
        of_groups: list[Scalars] = []
        for group in groups:
            own: dict[str, np.floating[Any]] = {}
            for name in names:
                if name == UNSCALE:
                    own[name] = real(self._unscale)
                elif name == CLIP_FACTOR:
                    norm = self._norm_of(group)
                    own[name] = batch.backend.clips.factor_scalar(factors, norm, real)
                else:
                    own[name] = ignore_fp_warnings(real, self._bound_of(group))
            of_groups.append(own)
        return staged, [{**each, **own} for each, own in zip(scalars, cycle(of_groups))]

    def _norm_of(self, group: int) -> int:
        """Returns the number of the norm of a parameter group's gradients."""
        return self._norms.get(group % self._num_groups, self._norms[0])

    def _dense(self, part: ClippedPart, batch: Batch, knows_scale: bool) -> DenseGradients:
        """Returns a batch's gradients.

        Args:
            part: What they are of.
            batch: Likewise.
            knows_scale: Whether the host or the device has what they are divided by.
        """
        arrays = part.arrays(batch)
        of_groups = [self._norm_of(group) for group in batch.scalar_groups]
        norms = of_groups * len(arrays)
        if batch.groups is not None:
            norms = [of_groups[at] for at in batch.groups]
        numbers: Sequence[int] = ()
        if self.decision is not None:
            at = batch.positions or range(len(arrays))
            numbers = self._numbers([part.numbers[position] for position in at])
        inputs = None
        if self._sums_inputs and part.rule.degrees and _NONE not in of_groups:
            inputs = self._rule_inputs(part.rule, batch, len(arrays), knows_scale)
        return DenseGradients(arrays, norms, numbers, inputs)

    def _rule_inputs(
        self, rule: UpdateRule, batch: Batch, num_arrays: int, knows_scale: bool
    ) -> RuleInputs | None:
        of_groups = [self._bound_of(group) for group in batch.scalar_groups]
        if not knows_scale and np.isfinite(of_groups).any():
            return None
        at_groups = [0] * num_arrays if batch.groups is None else batch.groups
        bounds = [of_groups[at] / (self._unscale or 1.0) for at in at_groups]
        return batch.backend.clips.inputs(rule, batch.plan, bounds)

    def _bound_of(self, group: int) -> float:
        """Returns the largest element of a parameter group's gradients."""
        return float(self._bounds.get(group % self._num_groups, self._bounds[0]))

    def _sparse(self, part: ClippedPart, batch: Batch) -> SparseGradient:
        values, rows = part.arrays(batch)
        norm = self._norm_of(batch.scalar_groups[0])
        height = part.gradients[0].dense_shape[0]
        [number] = self._numbers(part.numbers[:1])
        return SparseGradient(values, rows, height, norm, number)

    def _numbers(self, numbers: Sequence[int]) -> Sequence[int]:
        """Returns what GPUs call gradients with these numbers."""
        if self._num_alike == 1:
            return numbers
        return [number - number % self._num_alike for number in numbers]


def scalings(device: Device) -> LossScalings:
    """Returns the loss scales of a GPU that decides about steps."""
    found = backend_for(device).loss_scalings
    assert found is not None, "it is a GPU"
    return found


def checked_most(name: str, value: Any) -> Any:
    """Returns the most that something may be.

    Raises:
        ValueError: it is below 0, or NaN.
    """
    if not value >= 0:
        raise ValueError(f"{name} must be a number from 0, or None, got {value:.7g}")
    return abs(value)  # of -0.0, TensorFlow's formula makes NaN


def refuse_both(whose: str, most: Any, bound: Any) -> None:
    """Raises ValueError if gradients would be clipped by value and to a norm."""
    if np.isfinite(most) and np.isfinite(bound):
        raise ValueError(
            f"{whose}{CLIP_NORM}={most!s} and {CLIP_VALUE}={bound!s} cannot both clip: give one of "
            "them, or clip by hand before, with gpuopt.clip_by_value"
        )
