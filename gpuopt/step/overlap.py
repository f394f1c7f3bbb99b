"""Memory that one call would update twice."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
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
    if all(variable.owns_memory for variable in written) and (
        len({variable.identity for variable in written}) == len(written)
    ):
        return
    others = {variable.identity for variable in also_written}
    for device in {variable.device for variable in written}:
        _refuse_overlap([variable for variable in written if variable.device == device], others)


def copy_what_is_written(
    arrays: Sequence[Any], device: Device, written: Sequence[Variable]
) -> list[Any]:
    """Returns arrays of one device, with copies in the place of those that variables share.

    Args:
        arrays: Of `device`; they will be read after the first of `written` was written.
        device: The arrays' device.
        written: Variables of any device.
    """
    backend = backend_for(device)
    spans = [
        byte_bounds(backend.layout(variable.storage))
        for variable in written
        if variable.size and variable.device == device
    ]
    starts, ends = (sorted(bounds) for bounds in zip(*spans, strict=True)) if spans else ([], [])
    apart = []
    for array in arrays:
        start, end = byte_bounds(backend.layout(array)) if array.size else (0, 0)
        # The spans that end at or before the array's start, and those that start before its end.
        if bisect_right(ends, start) < bisect_left(starts, end):
            with backend.enter():
                array = array.copy()
        apart.append(array)
    return apart


def _refuse_overlap(variables: list[Variable], others: Set[Identity]) -> None:
    """Does what `refuse_shared_memory` does, for variables of one device."""
    layouts = [backend_for(variable.device).layout(variable.storage) for variable in variables]
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
            if earlier_start <= start < earlier_end and _share_memory(
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


def _share_memory(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
