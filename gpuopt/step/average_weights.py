"""The weight of a new value in a moving average, by the count of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.record import NOTHING_KNOWN, StepRecord
from gpuopt.device import Device
from gpuopt.rules.averaged import AVERAGE_WEIGHT
from gpuopt.rules.scaled import UNSCALE, scaled
from gpuopt.rules.update_rule import UpdateRule


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
            records: What devices know of the step: averages on one that refuses it stay.
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
