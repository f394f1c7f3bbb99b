"""Values and calls of one rank that all ranks take over, or those of its process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuopt.device import Device
from gpuopt.distributed.communicator import (
    BUCKET_BYTES,
    Communicator,
    fill_buckets,
    join_aligned,
    say_error,
    split_aligned,
)
from gpuopt.distributed.reduction import Mark
from gpuopt.errors import WorkerFailedError
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


def call_in_first_rank(
    communicator: Communicator,
    function: Callable[[list[Any]], None],
    value: Any,
    devices: Sequence[Device],
    what: str,
) -> None:
    """Calls `function` once in each process, with its ranks' values; all ranks wait for the end.

    Args:
        communicator: This rank's end of the group; all ranks make this call.
        function: Called by the first rank of each process, with the values of the process's ranks
            in their order.
        value: This rank's value. Arrays in it may be dropped when this returns.
        devices: The device of the arrays of each rank of the process, in the ranks' order.
        what: Describes the call, for error messages; the same on all ranks.

    Raises:
        Exception: what `function` raised in this process.
        WorkerFailedError: `function` raised in another process, but not in this one.
    """
    local = communicator.local
    brought = value, Mark(devices[local.rank])
    of_ranks: list[tuple[Any, Mark]] = local.all_gather(brought, f"values for {what}")
    failure, marks = None, []
    if local.rank == 0:
        for _, mark in of_ranks:
            mark.follow()
        try:
            function([value for value, _ in of_ranks])
        except Exception as error:
            failure = error
        marks = [Mark(device) for device in devices]
    failure, marks = local.all_gather((failure, marks), what)[0]
    marks[local.rank].follow()
    of_processes = []
    if local.size < communicator.size:
        # As text, because not every exception can be sent to another process.
        text = None if failure is None else _say(failure)
        of_processes = communicator.all_gather(text, what)
    if failure is not None:
        raise failure
    for rank, text in enumerate(of_processes):
        if text is not None:
            raise WorkerFailedError(f"rank {rank} has failed in {what}: {text}")


def call_in_rank_0(communicator: Communicator, function: Callable[[], Any], what: str) -> Any:
    """Calls `function` in rank 0; all ranks wait for the end, and get its result.

    Args:
        communicator: This rank's end of the group; all ranks make this call.
        function: Its result must be one that `all_gather` sends.
        what: Describes the call, for error messages; the same on all ranks.

    Raises:
        Exception: what `function` raised, in rank 0.
        WorkerFailedError: `function` has raised, in the other ranks.
    """
    result = failure = text = None
    if communicator.rank == 0:
        try:
            result = function()
        except Exception as error:
            failure, text = error, _say(error)
    result, text = communicator.all_gather((result, text), what)[0]
    if failure is not None:
        raise failure
    if text is not None:
        raise WorkerFailedError(f"rank 0 has failed in {what}: {text}")
    return result


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {say_error(error, str)}"
