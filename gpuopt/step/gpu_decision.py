"""What is written beside updates, in a step that a GPU decides about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.loss_scaling import Decided
from gpuopt.device import Device


class GpuDecision:
    """What a GPU has made of a step; a `Refusals`."""

    def __init__(self, device: Device, decided: Decided) -> None:
        """Takes what is known where the updates are enqueued.

        Args:
            device: The GPU.
            decided: What it has decided.
        """
        self._device = device
        self._decided = decided

    def unless_refused(self, device: Device, new: Any, old: Any) -> Any:
        """Returns what to write: `old` if the step is left out."""
        backend, flag = backend_for(device), self._decided.after
        assert backend.row_flags is not None, "it is a GPU"
        with backend.enter_reading(flag, kept=(flag, new, old)):
            return backend.row_flags.unless_set(flag, new, old)

    def choose(self, numbers: Sequence[np.floating[Any]]) -> Any:
        """Returns the number for the count of steps that the GPU has reached.

        Args:
            numbers: Those for the host's count, for one less, and so on, of one type.

        Returns:
            A scalar: an array there, unless all are equal.
        """
        if len(set(numbers)) == 1:
            return numbers[0]
        scalings = backend_for(self._device).loss_scalings
        assert scalings is not None, "it decides about steps"
        return scalings.choose(self._decided, numbers)
