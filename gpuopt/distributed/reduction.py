"""Gradients of several replicas become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuopt.backends import backend_for, moved, stored
from gpuopt.device import Device
from gpuopt.gradients import Gradient
from gpuopt.indexed_slices import IndexedSlices


class Mark:
    """A point in the work of one thread's stream, for other threads' streams to wait for."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.last_update: Any = None
        backend_for(device).made(self)

    def follow(self) -> None:
        """Has this thread's current stream wait for it."""
        with backend_for(self.device).active(self):
            pass


def sum_gradients(gradients: Sequence[Gradient], device: Device) -> Gradient:
    """Adds up gradients of one variable, in their given order.

    Args:
        gradients: At least one; all arrays of one shape and dtype, or all IndexedSlices.
        device: The variable's; gradients elsewhere are copied there.

    Returns:
        A new array, or IndexedSlices with all rows one after the other: repeated rows count as
        their sum. A single gradient is returned as it is.

    Raises:
        ValueError: some are arrays and some are IndexedSlices.
    """
    sparse = [isinstance(gradient, IndexedSlices) for gradient in gradients]
    if any(sparse) and not all(sparse):
        raise ValueError(
            "gradients of one variable must be either all arrays or all IndexedSlices, got "
            f"{[type(gradient).__name__ for gradient in gradients]}"
        )
    if len(gradients) == 1:
        return gradients[0]
    backend = backend_for(device)
    with backend.active():
        if not sparse[0]:
            first: Any = gradients[0]
            total = stored(first, device, first.dtype)
            for other in gradients[1:]:
                backend.xp.add(total, moved(other, device), out=total)
            return total
        return IndexedSlices(
            backend.xp.concatenate([moved(g.values, device) for g in gradients]),
            backend.xp.concatenate([moved(g.indices, device) for g in gradients]),
            gradients[0].dense_shape,
        )


def mean_of_rows(xp: Any, parts: Sequence[tuple[Any, Any]], *, divide: bool) -> tuple[Any, Any]:
    """Adds up rows of several gradients, each without repeated rows.

    Args:
        xp: The array module of the gradients' device.
        parts: (values [num_rows, ...], indices [num_rows]) of each gradient.
        divide: Whether each row is divided by the number of gradients that hold it.

    Returns:
        (values, indices), ascending and unique. Values are added in the order of `parts`.
    """
    if len(parts) == 1:
        values, indices = parts[0]
        order = xp.argsort(indices)
        return values[order], indices[order]
    rows = xp.unique(xp.concatenate([indices for _, indices in parts]))
    totals = xp.zeros((len(rows), *parts[0][0].shape[1:]), parts[0][0].dtype)
    counts = xp.zeros(len(rows), totals.dtype)
    for values, indices in parts:
        # Fancy indices may be added to in place, because no part repeats a row.
        positions = xp.searchsorted(rows, indices)
        totals[positions] += values
        counts[positions] += 1
    if divide:
        totals /= counts.reshape(-1, *[1] * (totals.ndim - 1))
    return totals, rows
