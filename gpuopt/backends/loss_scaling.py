"""The inputs and results of a device's decision whether a step with a loss scale is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from gpuopt.backends.clips import ClipLimits, DenseGradients, SparseGradient
from gpuopt.device import Device
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState


class Decision(NamedTuple):
    """How a device is to decide whether a step is made.

    Attributes:
        rule: How the loss scale changes.
        accept_after: See `after_step` of rules/loss_scaling.py.
        before: The loss scale before the step, from `LossScalings.new` or `Decided.after`.
        host_count: The largest possible count of steps since `LossScalings.new`.
        step: Which step since then it is, from 1.
        stops: Whether no step is made after one that is not finite.
        copies: What is the same as `before` on other devices, as far as it is there.
    """

    rule: ScaleRule
    accept_after: int | None
    before: Any
    host_count: int
    step: int
    stops: bool = False
    copies: Mapping[Device, Any] = MappingProxyType({})


class Decided(NamedTuple):
    """What updates of such a step read, in the place of factors; the host has not waited for it.

    Attributes:
        factors: See `Clips.factors`.
        after: The loss scale after the step; a row flag that is set if the step is left out.
        host_count: The largest possible count of steps, with this one.
        num_counts: How many counts updates are given scalars for: each one less than the one before
            it.
        memory: What both arrays are in, to be brought to other devices, if there are any.
    """

    factors: Any
    after: Any
    host_count: int
    num_counts: int = 1
    memory: Any = None


class LastBad(NamedTuple):
    """The last step whose gradients were not finite.

    Attributes:
        step: Its number; 0 if there was none. If it stops the ones after it, these are not told of.
        gradient: The number of its first gradient that was not; of a sparse one, the sums of equal
            rows are looked at. -1 if all were, and clipping would make them NaN.
    """

    step: int
    gradient: int


class LossScalings(Protocol):
    """Loss scales in a device's memory, and the decisions about its steps.

    Each is written once, and may be read on any stream. The host waits for nothing but `state`.
    """

    def new(self, state: ScaleState) -> Any:
        """Returns a loss scale with a state, after which no step was made yet."""

    def decide(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        limits: ClipLimits,
        decision: Decision,
        refused: Any = None,
    ) -> Decided:
        """Measures gradients, of which one has elements, and decides whether the step is made.

        It is if all gradients are finite, of a sparse one the sums of equal rows, and if no factor
        would make them NaN.

        Args:
            dense: See `Clips.measure`.
            sparse: Likewise.
            limits: Likewise; `unscale` is 0 for the reciprocal of the scale before the step.
            decision: How to decide.
            refused: Likewise. Refused rows are no reason to change the scale: the step is left out
                and not counted.
        """

    def sums(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        refused: Any = None,
    ) -> Any:
        """Returns what this device has for `join`; the arguments are those of `decide`."""

    def join(self, sums: Sequence[Any], limits: ClipLimits, decision: Decision) -> Decided:
        """Decides about a step of several devices.

        Args:
            sums: From `sums` of all devices with gradients, each brought to this one.
            limits: See `decide`.
            decision: Likewise.
        """

    def take(self, decided: Decided, memory: Any) -> Decided:
        """Returns what another device has decided, as updates of this one read it.

        Args:
            decided: From `join` of the other device.
            memory: Its `memory`, brought to this one.
        """

    def memory(self, scaling: Any) -> Any:
        """Returns what a loss scale is in, to be copied to another device on the current stream."""

    def copied(self, memory: Any) -> Any:
        """Returns a loss scale that is in the `memory` of another one, copied to this device."""

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
