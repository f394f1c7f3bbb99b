"""Sums the gradients of several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuopt.backends import backend_for, new_storage, to_device
from gpuopt.device import Device
from gpuopt.distributed.communicator import Communicator
from gpuopt.step.pairs import Gradient
from gpuopt.variables.indexed_slices import IndexedSlices


class Mark:
    """The present end of this thread's work on a device, for other threads' streams to wait for.

    A mark is of no use in another process.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.last_update: Any = None
        backend_for(device).record_creation(self)

    def follow(self) -> None:
        """Has this thread's current stream on the device wait for the mark."""
        with backend_for(self.device).enter(self):
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
    with backend.enter():
        if not sparse[0]:
            first: Any = gradients[0]
            total = new_storage(first, device, first.dtype)
            for other in gradients[1:]:
                backend.xp.add(total, to_device(other, device), out=total)
            backend.hold(*gradients)
            return total
        joined = IndexedSlices(
            backend.xp.concatenate([to_device(g.values, device) for g in gradients]),
            backend.xp.concatenate([to_device(g.indices, device) for g in gradients]),
            gradients[0].dense_shape,
        )
        backend.hold(*gradients)
        return joined


def bring_to(gradient: Gradient, device: Device) -> Gradient:
    """Returns a gradient on `device`: on the same memory if it is there already, else a copy."""
    if not isinstance(gradient, IndexedSlices):
        return to_device(gradient, device)
    values, indices = to_device(gradient.values, device), to_device(gradient.indices, device)
    return IndexedSlices(values, indices, gradient.dense_shape)


def sum_over_ranks(
    communicator: Communicator, gradients: Sequence[Gradient], what: str
) -> list[Gradient]:
    """Adds up each gradient over all ranks, to the same bits on every rank.

    Args:
        communicator: This rank's end of the group.
        gradients: This rank's gradients; each is an array on all ranks, or IndexedSlices on all.
        what: Describes the gradients. ValueError is raised on ranks whose descriptions differ.

    Returns:
        This rank's own sums. Those of IndexedSlices have all ranks' rows, one rank after the
        other: repeated rows count as their sum.
    """
    sums: list[Any] = list(gradients)
    sparse = [place for place, each in enumerate(gradients) if isinstance(each, IndexedSlices)]
    dense = [place for place, each in enumerate(gradients) if not isinstance(each, IndexedSlices)]
    # The first call describes all gradients, so that ranks whose gradients differ are told in it.
    if dense or not sparse:
        of_dense = communicator.batch_all_reduce([gradients[place] for place in dense], what=what)
        for place, total in zip(dense, of_dense, strict=True):
            sums[place] = total
    for place in sparse:
        is_first = not dense and place == sparse[0]
        sums[place] = communicator.all_gather_slices(sums[place], what if is_first else None)
    return sums


def add_up_rows(xp: Any, parts: Sequence[tuple[Any, Any]], *, divide: bool) -> tuple[Any, Any]:
    """Adds up rows of several gradients, (values, indices) each, without repeated rows.

    With `divide`, each row is divided by the number of gradients that hold it.

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
