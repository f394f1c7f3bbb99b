"""The protocol of measuring a step's gradients, and deciding about the step, before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from gpuopt.backends.loss_scaling import Decision
from gpuopt.backends.record import StepRecord
from gpuopt.rules.update_rule import UpdateRule

Array = Any


class ClipForm(IntEnum):
    """The factor of gradients of norm `n`, where `c` is the largest allowed norm."""

    TENSORFLOW = 0
    """`c * min(1 / n, 1 / c)`, and NaN if `n` is infinite or NaN."""
    TORCH = 1
    """`min(c / (n + 1e-6), 1)`, and so 0 if `n` is infinite."""
    APEX = 2
    """`1 / (n / c)` if `n` is more than `c`."""


# The columns of factors: see `Clips.join`.
SQUARES, NORM, FACTOR_OF_FLOAT32, FACTOR_OF_FLOAT64 = range(4)
NUM_COLUMNS = 5


class RuleInputs(NamedTuple):
    """A rule's sums over variables and their gradients, computed as these are measured.

    Attributes:
        rule: The rule, before it clips; it has `degrees`.
        plan: Of the variables.
        sums: The array that they are written to, for `StepRecord.sums`.
        bounds: The bound that each gradient is clipped to first, infinite for none: as given, or
            unscaled, where only the device knows the loss scale.
    """

    rule: UpdateRule
    plan: Any
    sums: Array
    bounds: Sequence[float]


class DenseGradients(NamedTuple):
    """Gradients of one dtype.

    Attributes:
        arrays: The gradients, of any shapes and strides.
        norms: The number of the norm that each belongs to; below 0 if it belongs to none.
        numbers: Where each stands in the step, for `LastBad`.
        inputs: From `Clips.inputs`, of their variables; each gradient then belongs to a norm.
    """

    arrays: Sequence[Array]
    norms: Sequence[int]
    numbers: Sequence[int] = ()
    inputs: RuleInputs | None = None

    def positions(self) -> dict[int, list[int]]:
        """Lists the positions of the gradients of each norm, but for empty ones."""
        by_norm: dict[int, list[int]] = {}
        for position, norm in enumerate(self.norms):
            if norm >= 0 and self.arrays[position].size:
                by_norm.setdefault(norm, []).append(position)
        return by_norm


class SparseGradient(NamedTuple):
    """One variable's sparse gradient.

    Attributes:
        values: [num_rows, ...], the gradient's rows.
        rows: [num_rows], int32 or int64 within range.
        height: The variable's number of rows.
        norm: The number of the norm that it belongs to, from 0.
        number: Where it stands in the step, for `LastBad`.
    """

    values: Array
    rows: Array
    height: int
    norm: int
    number: int = 0


class ClipLimits(NamedTuple):
    """The largest allowed norms, and how gradients are clipped to them.

    Attributes:
        most: The most of each norm, by number; infinite if it is only measured.
        form: The formula.
        is_double: Whether norms are float64; else they are rounded to float32.
        unscale: The factor of gradients before all else: norms are of the products.
        num_copies: How often each gradient comes: equal ones of copies of a variable count once.
    """

    most: Sequence[np.floating[Any]]
    form: ClipForm
    is_double: bool
    unscale: float = 1.0
    num_copies: int = 1


class Clips(Protocol):
    """Norms of floating-point arrays of one device, which are only read.

    An array's squares are added up in its compute type, in chunks of one size, and chunks in
    float64, always in the same order. A chunk whose sum float32 cannot hold has one nevertheless:
    gradients of a scaled loss may be that large. A sparse gradient's equal rows are added up first.
    On a GPU the host waits for nothing.
    """

    def inputs(self, rule: UpdateRule, plan: Any, bounds: Sequence[float]) -> RuleInputs | None:
        """Returns the sums to be computed as the gradients of a plan's variables are measured.

        None if `Backend.apply_dense` computes what the rule sums, if it sums anything.

        Args:
            rule: See `RuleInputs`.
            plan: Likewise.
            bounds: Likewise.
        """

    def sums(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        refused: Any = None,
        *,
        decides: bool = False,
    ) -> Array:
        """Returns what a device has for `join`: the sum of squares of each norm, float64.

        Args:
            dense: Gradients of all dtypes.
            sparse: Gradients of all dtypes.
            num_norms: How many norms there are.
            refused: See `StepRecord`: the result is undefined then.
            decides: Whether `join` is to decide about the step.
        """

    def measure(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        limits: ClipLimits,
        refused: Any = None,
        decision: Decision | None = None,
    ) -> StepRecord:
        """Does what `sums` and `join` do, for gradients of this device alone.

        The arguments are theirs. With a decision, one gradient has elements.
        """

    def join(
        self, sums: Sequence[Array], limits: ClipLimits, decision: Decision | None = None
    ) -> StepRecord:
        """Returns what follows from the gradients of several devices.

        A step that is decided about is made if all gradients are finite, of a sparse one the sums
        of equal rows, and if no factor would make them NaN. Refused rows are no reason to change
        the loss scale: the step is left out and not counted.

        Args:
            sums: From `sums` of all devices with gradients, each brought to this one.
            limits: The most of each norm. If there is a decision, `unscale` is 0 for the reciprocal
                of the scale before the step.
            decision: How to decide whether the step is made; None if the host does.

        Returns:
            The factors that gradients are multiplied by, float64 [num_norms, NUM_COLUMNS]: for each
            norm its sum of squares, the norm, the factor as computed in float32 and in float64, and
            `unscale`, which a device may have known alone. With a decision, `refused` is the loss
            scale after the step. On a GPU, the host has not waited for them.
        """

    def memory(self, record: StepRecord) -> Array:
        """Returns the array of the result of `join`, to be copied to another device at once."""

    def take(self, record: StepRecord, memory: Array) -> StepRecord:
        """Returns a record of another device for updates of this one.

        Args:
            record: From `join` of the other device.
            memory: Its `memory`, brought to this one.
        """

    def factor_scalar(
        self, factors: Array, norm: int, real: type[np.floating[Any]]
    ) -> np.floating[Any]:
        """Returns the scalar `clip_factor` of gradients that belong to a norm, or to none.

        In host memory it is the factor. Kernels take the norm's number, and find the factor by it.
        """


def sums_of(dense: Sequence[DenseGradients]) -> dict[int, Array]:
    """Returns `StepRecord.sums` of gradients that are measured."""
    every = [each.inputs for each in dense if each.inputs is not None]
    return {id(each.plan): each.sums for each in every}
