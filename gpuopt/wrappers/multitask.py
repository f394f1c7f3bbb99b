"""MultitaskOptimizerWrapper: a step leaves variables alone whose gradient is all zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.device import Device
from gpuopt.optimizer import Optimizer
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.chosen_updates import ChosenUpdates
from gpuopt.step.updates import Pair, Updates
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.operators import reading
from gpuopt.wrappers.base import StepWrapper


class MultitaskOptimizerWrapper(StepWrapper):
    """Leaves out the update of each variable whose gradient is zero everywhere, as contrib's does.

    For several tasks with a loss each: in a step of one task, the others' variables have gradients
    of zero, by which a momentum would decay and still move them. Here neither the variable nor its
    slots change. The step counts nevertheless, and `_finish` is called, as for Adam's powers of
    beta. IndexedSlices are zero if all their values are, and if there are none.

        optimizer = MultitaskOptimizerWrapper(MomentumOptimizer(0.1, 0.9))

    The host must know which gradients are zero. On GPUs, each step reduces every gradient to one
    number, and waits once for all of them.
    """

    def __init__(self, opt: Optimizer) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the steps; its state and its name are this optimizer's. Used by itself, it
                updates all variables as before.

        Raises:
            TypeError: `opt` is no optimizer.
        """
        super().__init__(opt)

    def _made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._inner,), {}

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        pairs = updates.pairs()
        with reading(*updates.read):
            is_zero = _all_zero(pairs)
        if not is_zero.any():
            return updates, nothing_to_forget
        chosen = [pair for pair, zero in zip(pairs, is_zero, strict=True) if not zero]
        return ChosenUpdates(optimizer, updates, chosen), nothing_to_forget


def _all_zero(pairs: Sequence[Pair]) -> np.ndarray[Any, Any]:
    """Says of each pair whether its gradient is all zero; the host waits for GPUs once."""
    positions: dict[Device, list[int]] = {}
    for position, (_, variable) in enumerate(pairs):
        positions.setdefault(variable.device, []).append(position)
    has_values = np.zeros(len(pairs), bool)
    of_gpus: list[Any] = []
    places: list[int] = []
    for device, here in positions.items():
        found = _have_values([pairs[position][0] for position in here], device)
        if device.kind == "cpu":
            has_values[here] = found
        else:
            of_gpus.append(found)
            places += here
    if of_gpus:
        first, *_ = [device for device in positions if device.kind == "gpu"]
        together = [to_device(found, first) for found in of_gpus]
        backend = backend_for(first)
        with backend.enter():
            has_values[places] = backend.to_host(backend.xp.concatenate(together))
    return ~has_values


def _have_values(gradients: Sequence[Any], device: Device) -> Any:
    """Says, in an array on the device, which gradients hold anything but zeros."""
    backend = backend_for(device)
    with backend.enter():
        arrays = [each.values if isinstance(each, IndexedSlices) else each for each in gradients]
        return backend.xp.stack([(array != 0).any() for array in arrays])
