"""A call that the first rank of each process makes for all ranks of the process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuopt.device import Device
from gpuopt.distributed.communicator import Communicator, say_error
from gpuopt.distributed.reduction import Mark
from gpuopt.errors import WorkerFailedError


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
        text = None if failure is None else f"{type(failure).__name__}: {say_error(failure, str)}"
        of_processes = communicator.all_gather(text, what)
    if failure is not None:
        raise failure
    for rank, text in enumerate(of_processes):
        if text is not None:
            raise WorkerFailedError(f"rank {rank} has failed in {what}: {text}")
