"""Connections of NCCL's: made together with all other ranks, within a time limit."""

from __future__ import annotations

from contextlib import suppress
from threading import Event, Thread
from typing import Any

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.distributed.communicators.nccl_library import call_in_group
from gpuopt.errors import DeadlineExceededError, WorkerFailedError

_HOW_TO_ASK = "(NCCL_DEBUG=WARN in the environment has it say more)"


def new_identity(nccl: Any, device: Device) -> bytes:
    """Returns what the ranks of a new connection have in common.

    Args:
        nccl: From `import_nccl`.
        device: The GPU of the rank that asks for it, for the error.

    Raises:
        WorkerFailedError: NCCL fails: it finds no network, say.
    """
    try:
        return nccl.get_unique_id()  # type: ignore[no-any-return]
    except Exception as error:  # CuPy has no type for some
        raise WorkerFailedError(
            f"NCCL cannot begin the connection of {device} with others: {error} {_HOW_TO_ASK}"
        ) from error


def connect(
    nccl: Any, device: Device, size: int, rank: int, identity: bytes, timeout_s: float
) -> Any:
    """Makes a communicator, together with all other ranks.

    Args:
        nccl: From `import_nccl`.
        device: This rank's GPU.
        size: How many ranks there are.
        rank: This one.
        identity: From `new_identity` of one of them.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        DeadlineExceededError: a rank does not come in time.
        WorkerFailedError: NCCL fails.
    """
    made: list[Any] = []
    is_made, is_given_up = Event(), Event()

    def make() -> None:
        try:
            with backend_for(device).enter():
                # In a group, the wait for the other ranks is in its end, where Python goes on.
                made.append(
                    call_in_group(nccl, lambda: nccl.NcclCommunicator(size, identity, rank))
                )
        except Exception as error:
            made.append(error)
        is_made.set()
        if is_given_up.is_set():
            _abort_late(made)

    # In a thread that can be left behind: NCCL waits for ever.
    Thread(target=make, daemon=True).start()
    try:
        if not is_made.wait(timeout_s):
            raise DeadlineExceededError(
                f"NCCL has not connected {device}, of rank {rank}, with {size - 1} others "
                f"within {timeout_s:g} s"
            )
        if isinstance(made[0], Exception):
            raise WorkerFailedError(
                f"NCCL cannot connect {device}, of rank {rank}: {made[0]} {_HOW_TO_ASK}"
            ) from made[0]
        return made[0]
    except BaseException:
        is_given_up.set()
        _abort_late(made)
        raise


def _abort_late(made: list[Any]) -> None:
    """Ends a communicator that nobody waits for any more; its own end would be `destroy`'s."""
    with suppress(IndexError):  # another thread has ended it, or there is none yet
        late = made.pop()
        if not isinstance(late, Exception):
            late.abort()
