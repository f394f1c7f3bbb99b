"""What a device is given to decide about a step of a scaled loss, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.backends.clips import ClipLimits, DenseGradients, SparseGradient
from gpuopt.rules.loss_scaling import ScaleRule, ScaleState


class Decision(NamedTuple):
    """How a device is to decide whether a step is made.

    Attributes:
        rule: How the loss scale changes.
        accept_after: See `after_step` of rules/loss_scaling.py.
        before: The loss scale before the step, from `LossScalings.new` or `Decided.after`.
        host_count: How many steps the host takes for made, of those since `LossScalings.new`.
    """

    rule: ScaleRule
    accept_after: int | None
    before: Any
    host_count: int


class Decided(NamedTuple):
    """What updates of such a step read, in the place of factors; the host has not waited for it.

    Attributes:
        factors: See `Clips.factors`.
        after: The loss scale after the step; a row flag that is set if the step is left out.
        host_count: How many steps the host takes for made, this one included.
        num_counts: How many counts updates are given scalars for: each one less than the one before
            it.
    """

    factors: Any
    after: Any
    host_count: int
    num_counts: int = 1


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

        It is if all gradients are finite; of a sparse one, the sums of equal rows.

        Args:
            dense: See `Clips.measure`.
            sparse: Likewise.
            limits: Likewise; `unscale` is 0 for the reciprocal of the scale before the step.
            decision: How to decide.
            refused: Likewise. Refused rows are no reason to change the scale: the step is left out
                and not counted.
        """

    def choose(self, decided: Decided, numbers: Sequence[np.floating[Any]]) -> Any:
        """Returns the number for the count of steps that was reached, a scalar array.

        It is for the current stream. Of a step that is left out, it is any of them.

        Args:
            decided: From `decide`.
            numbers: Those for the host's count, for one less, and so on, of one type.
        """

    def read(self, scaling: Any) -> Any:
        """Begins to read how many steps were made; returns a `FlagRead` of this one value."""

    def seed(self, scaling: Any) -> Any:
        """Returns the scale, a scalar array of float32, for the current stream."""

    def state(self, scaling: Any) -> tuple[ScaleState, int]:
        """Returns the state, and how many steps were made since `new`; the host waits for them."""
