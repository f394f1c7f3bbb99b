"""Ranks compare calls and wait for each other through a store of torch.distributed.

A store has bytes by key for all processes of a job, and adds to numbers atomically.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gpuopt.distributed.communicator import say_error, say_who
from gpuopt.distributed.communicators.headers import Header, Kind, digest_of
from gpuopt.distributed.waiting import LONGEST_SLEEP_S, WaitForRanks
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError, WorkerFailedError
from gpuopt.locks import renew_after_fork

# The verdict of a call to which all ranks have come. Any other one is the error that ends the run.
_GO = "go"

_ERRORS = {
    each.__name__: each for each in (CancelledError, DeadlineExceededError, WorkerFailedError)
}


class StoreMeeting:
    """This rank's part in the calls of all ranks.

    In each call, every rank writes a header to the store, and the last one also writes the verdict
    "go". A rank that gives up, fails or finishes writes an error as the verdict; the first verdict
    counts. So all ranks make a call, or none does, and no rank waits in torch's collectives for a
    rank that will not come. Keys are deleted when all ranks have come to a later call.

    Attributes:
        rank: The number of this rank.
        size: How many ranks there are.
        is_running: Whether a run goes on; the caller of `begin_run` sets it to False at the end.
        has_core: Whether this host has a core for each of its ranks.
        timeout_s: How long a rank waits for the others, in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Takes over a store, whose keys are for this meeting alone."""
        self.rank = rank
        self.size = size
        self.is_running = False
        self.has_core = True
        self.timeout_s = timeout_s
        self._store = store
        self._run = 0
        self._number = 0
        # The error that ended this rank's run, and the error that ends all runs.
        self._end: GpuoptError | None = None
        self._end_of_all: GpuoptError | None = None
        # The keys that this rank has to delete.
        self._left: list[str] = []
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The connections belong to the parent."""
        self.break_off(
            f"rank {self.rank} is the process that this child was forked from, and not the child"
        )

    def break_off(self, why: str) -> None:
        """Ends this run and all later ones."""
        self._end = self._end_of_all = WorkerFailedError(why)

    def check_no_run(self) -> None:
        """Raises an error if a run cannot begin.

        Raises:
            RuntimeError: the last run goes on.
            WorkerFailedError: the group was broken off.
        """
        if self.is_running:
            raise RuntimeError(
                "a group's `run` was called in a `run` of the same group: in it, use its "
                "communicator, and call MirroredStrategy's run and variable outside"
            )
        self._end = self._end_of_all
        self._raise_end()

    def begin_run(self) -> None:
        """Forgets how the last run ended."""
        self.is_running = True
        self._run += 1
        self._number = 0

    def end_run(self, error: BaseException | None) -> None:
        """Announces to all other ranks that this one has failed, by `error`, or finished."""
        if self._end_of_all is not None:
            return
        with suppress(RuntimeError):  # the store may be gone
            if error is None or (isinstance(error, SystemExit) and not error.code):
                text = f"rank {self.rank} has finished, and will not come"
                self._announce_end(CancelledError(text))
            else:
                self.announce_failure(error)
        self._end = self._end or CancelledError(f"the run of rank {self.rank} is over")

    def leave(self, limit_s: float) -> None:
        """Announces the end of this process; rank 0 waits for that of all others.

        Its process may hold the store, from which they read the end of the last run.

        Args:
            limit_s: How long it waits, in seconds.
        """
        if self._end_of_all is not None or self.is_running:
            return
        self.begin_run()
        self.end_run(None)
        self._store.add("left", 1)
        waiting = WaitForRanks("the end of the process", limit_s, self.has_core)
        while self.rank == 0 and self._store.add("left", 0) < self.size:
            if not waiting.pause(LONGEST_SLEEP_S):
                break

    def announce_failure(self, error: BaseException) -> None:
        """Ends the run of all ranks by an error that this one has raised."""
        text = f"rank {self.rank} has failed: {type(error).__name__}: {say_error(error, str)}"
        if isinstance(error, WorkerFailedError):
            text = str(error)  # names the rank that failed first
        while self._announce_end(WorkerFailedError(text)) is None:
            self._number += 1

    def meet(
        self, what: str, details: str = "", sizes: tuple[int, ...] = (), inline: bytes = b""
    ) -> list[Header]:
        """Waits for all ranks to make the same call, and returns their headers.

        Args:
            what: Describes the call, for errors.
            details: More that must be the same on all ranks; part of the error if it is not.
            sizes: Of the blocks that this rank will send, in bytes.
            inline: Bytes to send in the header, a few kilobytes at most.

        Raises:
            ValueError: the ranks make different calls.
            DeadlineExceededError: a rank does not come in time.
            WorkerFailedError: a rank has failed.
            CancelledError: a rank has finished.
        """
        self._raise_end()
        description = f"{what} {details}".rstrip()
        header = Header(Kind.CALL, self._run, self._number, digest_of(description), sizes, inline)
        try:
            headers = self._meet(what, header)
        except GpuoptError:
            raise
        except BaseException as error:  # Ctrl-C, or the store is gone
            self._end = WorkerFailedError(f"rank {self.rank} has given up {what}")
            with suppress(RuntimeError):
                self.announce_failure(error)
            if isinstance(error, RuntimeError):
                self.break_off(f"{what}: the store of torch.distributed is gone: {error}")
                raise WorkerFailedError(str(self._end)) from error
            raise
        if any(each.digest != header.digest for each in headers):
            keys = [self._key("text", rank) for rank in range(self.size)]
            self._store.set(keys[self.rank], description)
            self._meet("the calls that differ", header)
            texts = self._store.multi_get(keys)
            self._left.append(keys[self.rank])
            brought = say_who([bytes(text).decode() for text in texts])
            raise ValueError(f"all ranks must make the same call, got {brought}")
        return headers

    def raise_failure(self) -> None:
        """Ends the run for this rank, by the verdict of another one.

        Raises:
            WorkerFailedError: always.
        """
        self._end = _read_end(self._store.get(self._key("verdict")))
        self._raise_end()

    def fail_by(self, error: Exception, what: str) -> None:
        """Ends the run for this rank by an error of its own, in a call.

        Raises:
            Exception: always the given one.
        """
        self._end = WorkerFailedError(f"rank {self.rank} has given up {what}")
        raise error

    def _meet(self, what: str, mine: Header) -> list[Header]:
        keys = [self._key("call", rank) for rank in range(self.size)]
        verdict, earlier = self._key("verdict"), self._left
        self._left = [*earlier, keys[self.rank]]
        self._store.set(keys[self.rank], mine.pack())
        if self._store.add(self._key("came"), 1) == self.size:
            self._end = self._decide(_GO)
        else:
            waiting = WaitForRanks(what, self.timeout_s, self.has_core)
            while not self._store.check([verdict]):
                if not waiting.pause(LONGEST_SLEEP_S, self._missing):
                    missing = ", ".join(map(str, self._missing()))
                    late = f"{what}: rank {missing} did not come within {self.timeout_s:g} s"
                    self._announce_end(DeadlineExceededError(late))
            self._end = _read_end(self._store.get(verdict))
        self._raise_end()
        headers = [Header.unpack(bytes(each)) for each in self._store.multi_get(keys)]
        # All have come to this call, so all have read the keys of earlier ones.
        for key in earlier:
            self._store.delete_key(key)
        self._left = self._keys_of_call()
        self._number += 1
        return headers

    def _missing(self) -> list[int]:
        """Returns the ranks that have not come to the call."""
        ranks = range(self.size)
        return [rank for rank in ranks if not self._store.check([self._key("call", rank)])]

    def _announce_end(self, error: GpuoptError) -> GpuoptError | None:
        """Ends the run of all ranks at this rank's present call.

        Returns:
            The error of the first verdict; None if all ranks have come to the call.
        """
        self._left += self._keys_of_call()
        return self._decide(f"{type(error).__name__}:{error}")

    def _decide(self, verdict: str) -> GpuoptError | None:
        return _read_end(self._store.compare_set(self._key("verdict"), "", verdict))

    def _keys_of_call(self) -> list[str]:
        """Returns the keys of the call that this rank deletes."""
        common = [self._key("came"), self._key("verdict")] if self.rank == 0 else []
        return [self._key("call"), *common]

    def _raise_end(self) -> None:
        if self._end is not None:
            raise type(self._end)(str(self._end))

    def _key(self, name: str, rank: int | None = None) -> str:
        """Returns a key of the present call, and of a rank: by default this one."""
        of_rank = f"/{self.rank if rank is None else rank}" if name in ("call", "text") else ""
        return f"{self._run}/{self._number}/{name}{of_rank}"


def _read_end(verdict: bytes) -> GpuoptError | None:
    kind, _, text = bytes(verdict).decode().partition(":")
    return None if kind == _GO else _ERRORS[kind](text)
