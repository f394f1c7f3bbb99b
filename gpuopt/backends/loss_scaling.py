"""Loss scales in a device's memory, and how the device decides whether a step is made."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from gpuopt.device import Device
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState


class Decision(NamedTuple):
    """How a device is to decide whether a step is made.

    Attributes:
        rule: How the loss scale changes.
        accept_after: See `after_step` of rules/loss_scaling.py.
        before: The loss scale before the step: from `LossScalings.new`, or `refused` of a record.
        step: Which step since then it is, from 1.
        stops: Whether no step is made after one that is not finite.
        copies: Copies of `before` on other devices, where there are any.
        num_counts, most_made: See `StepRecord`; counts begin at `LossScalings.new`.
    """

    rule: ScaleRule
    accept_after: int | None
    before: Any
    step: int
    stops: bool = False
    copies: Mapping[Device, Any] = MappingProxyType({})
    num_counts: int = 1
    most_made: int = 0


class LastBad(NamedTuple):
    """The last step whose gradients were not finite.

    Attributes:
        step: Its number; 0 if there was none. Steps that it stops are not reported.
        gradient: The number of its first gradient that was not; of a sparse one, the sums of equal
            rows are looked at. -1 if all were, and clipping would make them NaN.
    """

    step: int
    gradient: int


class LossScalings(Protocol):
    """Loss scales in a device's memory; `Clips.measure` and `Clips.join` make new ones.

    Each is written once, and may be read on any stream. The host waits for nothing but `state`.
    """

    def new(self, state: ScaleState) -> Any:
        """Returns a loss scale with a state, after which no step was made yet."""

    def memory(self, scaling: Any) -> Any:
        """Returns a loss scale's array, to be copied to another device on the current stream."""

    def copied(self, memory: Any) -> Any:
        """Returns a loss scale in the `memory` of another device's, which was brought here."""

    def read(self, scaling: Any) -> Any:
        """Begins to read what the host follows; returns a `FlagRead`.

        Its values are how many steps were made, and the two of `LastBad`.
        """

    def seed(self, scaling: Any) -> Any:
        """Returns the scale, a scalar array of float32, for the current stream."""

    def unscale(self, scaling: Any) -> Any:
        """Returns the scale's reciprocal, likewise."""

    def state(self, scaling: Any) -> tuple[ScaleState, int, LastBad]:
        """Returns the state, and how many steps were made since `new`; the host waits for them.

        And the last step since then whose gradients were not finite.
        """
