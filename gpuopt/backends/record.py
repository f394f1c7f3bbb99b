"""The record of one call on one device: an argument of each update there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class StepRecord(NamedTuple):
    """Results of measuring a call's gradients, in a device's memory; the host has not waited.

    Attributes:
        refused: From `RowFlags.new`, or a loss scale after the step: updates that find it set write
            nothing. None if no update can be refused.
        factors: The table of clip factors: see `Clips.join`. None if no gradient belongs to a norm.
        sums: The sums of rules over variables, by the id of the variables' plan, if they were
            computed with the norms: see `Clips.inputs`.
        num_counts: How many counts of steps updates are given scalars for, as the device may leave
            steps out: those of all groups for each count, which is one less than the one before it.
        most_made: The largest of these counts, with this step.
    """

    refused: Any = None
    factors: Any = None
    sums: Mapping[int, Any] = MappingProxyType({})
    num_counts: int = 1
    most_made: int = 0


NOTHING_KNOWN = StepRecord()
