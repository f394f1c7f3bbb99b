"""Consecutive steps that a GPU decides about, as far as the host knows of their decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.step.clips import CLIPPING_MAKES_NAN, scalings
from gpuopt.variables.behind import RowsBehind, own_numbers
from gpuopt.variables.identity import Identity

Result = TypeVar("Result")
# See `RuleUpdates.measured_names`.
Names = Sequence[tuple[Sequence[int], Sequence[str], bool]]


class DeviceScale(NamedTuple):
    """A loss scale that the host may not know.

    Attributes:
        scaling: From `LossScalings`.
        device: The GPU.
    """

    scaling: Any
    device: Device

    def seed(self) -> Any:
        """Returns it as a scalar array there."""
        return scalings(self.device).seed(self.scaling)

    def unscale(self) -> Any:
        """Returns its reciprocal as a scalar array there."""
        return scalings(self.device).unscale(self.scaling)

    def number(self) -> np.float32:
        """Waits for it."""
        return np.float32(scalings(self.device).state(self.scaling)[0].loss_scale)


def reciprocal_on(loss_scale: Any, device: Device) -> Any:
    """Returns the factor that divides gradients by a loss scale.

    Args:
        loss_scale: A number, or a `DeviceScale`, for which the host does not wait.
        device: The gradients' device.

    Returns:
        A float32; for a `DeviceScale`, a scalar array on the device.
    """
    if isinstance(loss_scale, DeviceScale):
        return to_device(loss_scale.unscale(), device)
    return np.float32(1) / np.float32(loss_scale)


class Outcome(NamedTuple):
    """A decision on its way to the host.

    Attributes:
        step: The step's number in its chain, from 1.
        read: The count after it and the first gradient that was not finite, from
            `LossScalings.read`.
        names: `RuleUpdates.measured_names` of the step.
    """

    step: int
    read: Any
    names: Names

    @property
    def nonfinite(self) -> str | None:
        """Describes the first gradient that was not finite; None if all were. It has arrived."""
        _, step, gradient = map(int, self.read.values)
        if step != self.step:
            return None
        for numbers, named, is_sparse in self.names:
            if gradient in numbers:
                found = f'gradient for "{named[numbers.index(gradient)]}" is not finite'
                return f"{found}, or equal rows of it add up to what is not" if is_sparse else found
        return CLIPPING_MAKES_NAN


class Count(NamedTuple):
    """The numbers of a step for one possible count of the steps before it.

    Attributes:
        numbers: The values of the variables that steps change, by identity: arrays that nothing
            writes.
        of_step: The `StepNumbers` of the updates; None for a step that was not prepared yet.
    """

    numbers: Mapping[Identity, Any]
    of_step: Any


class Chain(NamedTuple):
    """Consecutive steps that a GPU decides about. Immutable: each step replaces it by another.

    Attributes:
        policy: Their `DeviceScaling`.
        scale: The loss scale after the last promised step.
        copies: The same on the other devices of that step.
        devices: All devices of the updates.
        last: The last step that `counts` was computed for, even if it was not promised.
        num_calls: The number of promised steps.
        num_made: How many of them the GPU has made, as far as the host knows.
        counts: The numbers for each possible count, in ascending order; the first is `num_made`.
            There is one more than there are steps with an unknown decision.
    """

    policy: Any
    scale: DeviceScale
    copies: Mapping[Device, Any]
    devices: Collection[Device]
    last: Any
    num_calls: int
    num_made: int
    counts: Sequence[Count]

    def after(self, outcome: Outcome) -> Chain:
        """Returns the chain once the oldest unknown decision has arrived."""
        count = int(outcome.read.values[0])
        is_made = count > self.num_made
        counts = self.counts[1:] if is_made else self.counts[:-1]
        return self._replace(num_made=self.num_made + is_made, counts=counts)

    def assign(self, ledger: RowsBehind) -> None:
        """Assigns the variables' values once all decisions have arrived; it can be repeated.

        Args:
            ledger: It has the chain.
        """
        numbers = [self.counts[0].numbers[each.identity] for each in self.last.variables]
        own: Mapping[str, Any] = self.policy.variables
        if own:
            state, *_ = scalings(self.scale.device).state(self.scale.scaling)
            numbers += [getattr(state, name) for name in own]

        def assign() -> None:
            for variable, number in zip(self.variables(), numbers, strict=True):
                if variable.numpy() != number:
                    variable.assign(np.asarray(number, variable.dtype))

        with_numbers(ledger, {}, assign)

    def variables(self) -> list[Any]:
        """Returns what has values that the host may not know."""
        return [*self.last.variables, *self.policy.variables.values()]


def with_numbers(
    ledger: RowsBehind, numbers: Mapping[Identity, Any], call: Callable[[], Result]
) -> Result:
    """Calls a function that reads a step's own numbers, and returns its result."""
    outer, outer_numbers = own_numbers.ledger, own_numbers.of
    try:
        own_numbers.ledger, own_numbers.of = ledger, numbers
        return call()
    finally:  # without a call: Ctrl-C at one would leave them to this thread for ever
        own_numbers.ledger, own_numbers.of = outer, outer_numbers
