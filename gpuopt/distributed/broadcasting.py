"""Values that all ranks take over from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuopt.distributed.communicator import (
    BUCKET_BYTES,
    Communicator,
    fill_buckets,
    join_aligned,
    split_aligned,
)
from gpuopt.variables.variable import Variable


def broadcast_all(communicator: Communicator, arrays: Sequence[Any], root: int) -> list[Any]:
    """Returns the arrays of rank `root`, sent in few messages.

    Args:
        communicator: This rank's end of the group; all ranks make this call.
        arrays: Of the same shapes and dtypes on all ranks, on this rank's device. They may be
            overwritten.
        root: Whose arrays count.
    """
    received = list(arrays)
    if communicator.size == 1:
        return received
    for positions in fill_buckets(received, BUCKET_BYTES):
        parts = [received[position] for position in positions]
        if len(parts) == 1:
            parts = [communicator.broadcast(parts[0], root)]
        else:
            parts = split_aligned(communicator.broadcast(join_aligned(parts), root), parts)
        for position, part in zip(positions, parts, strict=True):
            received[position] = part
    return received


def take_value_of_rank_0(communicator: Communicator, variable: Variable, name: str) -> None:
    """Has a new variable begin with rank 0's value.

    Args:
        communicator: This rank's end of the group; all ranks make this call.
        variable: This rank's variable.
        name: What all ranks call it.

    Raises:
        ValueError: another rank makes a variable of another name, shape or dtype.
    """
    communicator.barrier(f'variable "{name}" of {variable.dtype}{list(variable.shape)}')
    value = communicator.broadcast(variable.numpy())
    if communicator.rank != 0:
        variable.assign(value)
