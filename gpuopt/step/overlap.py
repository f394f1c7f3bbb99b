"""Memory that one call would update twice."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable

# np.shares_memory solves a small integer program; interleaved views need little work.
_OVERLAP_WORK = 100_000


def refuse_shared_memory(
    variables: Sequence[Variable], also_written: Sequence[Variable] = ()
) -> None:
    """Raises ValueError where two updates of one memory would depend on their order.

    Args:
        variables: The variables that one call updates by gradients.
        also_written: What the call also writes: the slots of `variables`, the global step.
    """
    written = [*variables, *also_written]
    if not [each for each in written if not each.owns_memory] and (
        len({variable.identity for variable in written}) == len(written)
    ):
        return
    others = {variable.identity for variable in also_written}
    for device in {variable.device for variable in written}:
        _refuse_overlap([variable for variable in written if variable.device == device], others)


class Written:
    """The memory of variables that a step writes one after the other."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        spans: dict[Device, list[tuple[int, int]]] = {}
        for variable in variables:
            if variable.size:
                layout = backend_for(variable.device).layout(variable.unread_storage)
                spans.setdefault(variable.device, []).append(byte_bounds(layout))
        # For each device, where they begin and where they end, both in ascending order.
        self._bounds = {
            device: [sorted(bounds) for bounds in zip(*listed, strict=True)]
            for device, listed in spans.items()
        }

    def copy_if_shared(self, array: Any, device: Device) -> Any:
        """Returns an array of a device, or a copy if it has a part of this memory."""
        if device not in self._bounds or not array.size:
            return array
        backend = backend_for(device)
        start, end = byte_bounds(backend.layout(array))
        starts, ends = self._bounds[device]
        # The spans that end at or before the array's start, and those that start before its end.
        if bisect_right(ends, start) >= bisect_left(starts, end):
            return array
        with backend.enter():
            return array.copy()


def _refuse_overlap(variables: list[Variable], others: Set[Identity]) -> None:
    """Does what `refuse_shared_memory` does, for variables of one device."""
    layouts = [
        backend_for(variable.device).layout(variable.unread_storage) for variable in variables
    ]
    spans = sorted(
        (*byte_bounds(layouts[position]), position)
        for position, variable in enumerate(variables)
        if variable.size
    )
    reach = 0  # of the spans so far, the one that ends last
    for position in range(1, len(spans)):
        if spans[position - 1][1] > spans[reach][1]:
            reach = position - 1
        start = spans[position][0]
        if start >= spans[reach][1]:
            continue
        later = variables[spans[position][2]]
        for earlier_start, earlier_end, earlier_position in spans[:position]:
            earlier = variables[earlier_position]
            if earlier_start <= start < earlier_end and share_memory(
                layouts[earlier_position], layouts[spans[position][2]]
            ):
                _refuse_pair(earlier, later, others)


def _refuse_pair(earlier: Variable, later: Variable, others: Set[Identity]) -> None:
    same = earlier.identity is later.identity
    if earlier.identity in others or later.identity in others:
        what = f'"{later.name}"' if same else f'memory of "{earlier.name}" and "{later.name}"'
        raise ValueError(
            f"{what} would be written twice, once of it as a slot or as the global step: memory "
            "can be updated only once in a call; use a call for each"
        )
    what = "appears twice" if same else f'shares memory with "{earlier.name}"'
    raise ValueError(
        f'"{later.name}" {what}: memory can be updated only once in a call; add the '
        "gradients up first"
    )


def share_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Returns whether two layouts have an element on the same memory, or may have."""
    try:
        return np.shares_memory(one, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
