"""The weight of a new value in a moving average, by the count of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.loss_scaling import Decided
from gpuopt.device import Device
from gpuopt.rules.averaged import AVERAGE_WEIGHT
from gpuopt.rules.scaled import UNSCALE, scaled
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.ledger import Ledger


class Joined(NamedTuple):
    """What `Backend.apply_dense` is given."""

    rule: UpdateRule
    scalars: Sequence[Scalars]
    factors: Any
    refused: Any


class AverageWeights:
    """The weights of new values in one move of averages."""

    def __init__(
        self,
        weights: Sequence[np.floating[Any]],
        ledger: Ledger | None = None,
        decided: Mapping[Device, Decided] | None = None,
    ) -> None:
        """Takes the weights, of float32.

        Args:
            weights: A single one; or, in a step that GPUs have decided about, one for each count of
                steps that they may have, the host's first.
            ledger: Of the step: averages on a GPU that refuses its rows stay as they are.
            decided: What each GPU has made of the step: likewise.
        """
        self._weights = weights
        self._ledger = ledger
        self._decided = decided or {}

    def join(self, rule: UpdateRule, device: Device, real: type[np.floating[Any]]) -> Joined:
        """Returns a rule and its scalars, for averages on one device.

        Args:
            rule: Takes the weight alone.
            device: Where the averages are.
            real: What the rule computes in.
        """
        scalars: list[Scalars] = [{AVERAGE_WEIGHT: real(weight)} for weight in self._weights]
        decided = self._decided.get(device)
        if decided is None:
            refused = None if self._ledger is None else self._ledger.flag(device)
            return Joined(rule, scalars, None, refused)
        if len(set(self._weights)) == 1:
            return Joined(rule, scalars[:1], None, decided.after)
        every = [{**each, UNSCALE: real(1)} for each in scalars]
        factors = decided._replace(num_counts=len(every))
        return Joined(scaled(rule), every, factors, decided.after)
