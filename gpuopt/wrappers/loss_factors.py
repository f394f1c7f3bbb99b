"""The factors of gradients of a scaled loss as they are added up."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.clips import NUM_COLUMNS
from gpuopt.device import Device
from gpuopt.step.chain import reciprocal_on


class _LossFactor:
    """The reciprocal of a loss scale on a device.

    Attributes:
        array: Read, and never written again.
        last_update: When it was made: see `Updated`.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self.last_update: Any = None


class LossFactors:
    """The reciprocals of one loss scale after the other; each is made once on a device."""

    def __init__(self) -> None:
        self._loss_scale: Any = None
        self._made: dict[Device, _LossFactor] = {}

    def on(self, device: Device, loss_scale: Any) -> Any:
        """Returns the reciprocal there, in the place of `StepRecord.factors` of one norm.

        Work on the current stream waits until it is made, and must hold it: the next scale's is
        another.

        Args:
            device: Where gradients are.
            loss_scale: See `reciprocal_on`.
        """
        before = self._loss_scale
        if type(loss_scale) is not type(before) or loss_scale != before:
            self._loss_scale, self._made = loss_scale, {}
        backend = backend_for(device)
        found = self._made.get(device)
        if found is None:
            factor = reciprocal_on(loss_scale, device)
            with backend.enter():
                array = backend.xp.empty((1, NUM_COLUMNS), np.float64)
                array[...] = factor
            found = self._made[device] = _LossFactor(array)
            backend.record_creation(found)
        with backend.enter(found):
            return found.array
