"""A communicator that is slow and simple: every rank sends every value to every other rank.

It implements the protocol and nothing else, so code that trains over it uses the protocol alone.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from gpuopt import CancelledError, DeadlineExceededError, IndexedSlices, WorkerFailedError
from gpuopt.distributed import Communicator, RankGroup
from gpuopt.distributed.communicator import check_op, check_root, say_error
from gpuopt.distributed.communicators.threads import run_threads

_REDUCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Channel(Protocol):
    """Takes messages from one rank to another."""

    def send(self, message: Any) -> None: ...

    def receive(self, timeout_s: float) -> Any:
        """Returns the next message, or raises TimeoutError, or EOFError if none can come."""


class References:
    """To a thread of the same process: what is sent arrives itself."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def receive(self, timeout_s: float) -> Any:
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None


class Copies(References):
    """As to another process: what is sent arrives as a copy."""

    def send(self, message: Any) -> None:
        super().send(pickle.dumps(message))

    def receive(self, timeout_s: float) -> Any:
        return pickle.loads(super().receive(timeout_s))


class Socket:
    """To another process. Both ends may send a few kilobytes before the other receives."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, message: Any) -> None:
        # If the other process has ended, the ranks that wait for it will notice.
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)

    def receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            raise TimeoutError
        try:
            return self._connection.recv()
        except ConnectionError:
            raise EOFError from None


class NaiveCommunicator(Communicator):
    """A rank with a channel to, and one from, every other rank."""

    def __init__(
        self,
        rank: int,
        to_ranks: Mapping[int, Channel],
        from_ranks: Mapping[int, Channel],
        timeout_s: float,
        local: NaiveCommunicator | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(to_ranks) + 1
        self._to_ranks = to_ranks
        self._from_ranks = from_ranks
        self._timeout_s = timeout_s
        self._local = local
        self._run = 0
        self._end: Exception | None = None

    @property
    def local(self) -> NaiveCommunicator:
        return self if self._local is None else self._local

    def all_reduce(self, array: Any, op: Any = "sum") -> Any:
        check_op(op)
        what = f"all_reduce({op!r}) of {array.dtype}{list(array.shape)}"
        return reduce(_REDUCTIONS[op], self.all_gather(array.copy(), what))

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        if self._end is not None:
            raise self._end
        self._send("value", what, value)
        deadline = time.monotonic() + self._timeout_s
        messages = [
            (what, value) if rank == self.rank else self._receive(rank, what, deadline)
            for rank in range(self.size)
        ]
        if any(said != what for said, _ in messages):
            raise ValueError(
                f"all ranks must make the same call, got {[said for said, _ in messages]}"
            )
        return [value for _, value in messages]

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        name = f"all_gather_slices of {slices.dtype}[:, {list(slices.values.shape[1:])}], {what}"
        parts = self.all_gather((slices.values.copy(), slices.indices.copy()), name)
        values, indices = (np.concatenate(of_ranks) for of_ranks in zip(*parts, strict=True))
        return IndexedSlices(values, indices, slices.dense_shape)

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        what = f"broadcast from {root} of {array.dtype}{list(array.shape)}"
        array[...] = self.all_gather(array.copy(), what)[root]
        return array

    def barrier(self, what: str = "barrier") -> None:
        self.all_gather(None, what)

    def begin_run(self) -> None:
        """Forgets how the last run ended; its messages that are still under way do not count."""
        self._run += 1
        self._end = None

    def end_run(self, kind: str, text: str) -> None:
        """Tells all other ranks that this one has "failed" or "finished"."""
        self._send(kind, text, None)

    def _send(self, kind: str, text: str, value: Any) -> None:
        for channel in self._to_ranks.values():
            channel.send((self._run, kind, text, value))

    def _receive(self, rank: int, what: str, deadline: float) -> tuple[str, Any]:
        run = -1
        try:
            while run < self._run:
                seconds = max(0, deadline - time.monotonic())
                run, kind, text, value = self._from_ranks[rank].receive(seconds)
        except TimeoutError:
            self._end = DeadlineExceededError(
                f"{what}: rank {rank} did not come within {self._timeout_s:g} s"
            )
            raise self._end from None
        except EOFError:
            kind, text, value = "failed", "its process has ended", None
        if kind == "failed":
            self._end = WorkerFailedError(f"rank {rank} has failed: {text}")
        if kind == "finished":
            self._end = CancelledError(f"rank {rank} has finished, and will not come")
        if self._end is not None:
            raise self._end
        return text, value


class NaiveGroup(RankGroup):
    """Ranks that are threads; one rank's arrays reach another as a copy, but through `local`."""

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size = self.local_size = size
        self._timeout_s = timeout_s

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        ranks = range(self.size)
        locals_ = connect_threads(ranks, References, self._timeout_s)
        everyone = connect_threads(ranks, Copies, self._timeout_s, locals_)
        return run_ranks(function, everyone, self._timeout_s)


class ProcessGroup(RankGroup):
    """Some ranks are threads of this process, the others of other processes."""

    def __init__(
        self, ranks: Sequence[int], sockets: Mapping[tuple[int, int], int], timeout_s: float
    ) -> None:
        """Takes over what joins the processes.

        Args:
            ranks: The ranks of this process.
            sockets: From (a rank of this process, one of another) to the descriptor of a socket.
            timeout_s: How long a rank waits for the others.
        """
        self.local_size = len(ranks)
        away = {other for _, other in sockets}
        self.size = len(ranks) + len(away)
        local = connect_threads(range(len(ranks)), References, timeout_s)
        here = {(a, b): Copies() for a in ranks for b in ranks if a != b}
        there = {pair: Socket(descriptor) for pair, descriptor in sockets.items()}
        self._communicators = [
            NaiveCommunicator(
                rank,
                {b: channel for (a, b), channel in {**here, **there}.items() if a == rank},
                {b: here.get((b, rank)) or there[rank, b] for b in {*ranks, *away} - {rank}},
                timeout_s,
                local[place],
            )
            for place, rank in enumerate(ranks)
        ]
        self._timeout_s = timeout_s

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        return run_ranks(function, self._communicators, self._timeout_s)


def connect_threads(
    ranks: Sequence[int],
    channel: Callable[[], Channel],
    timeout_s: float,
    locals_: Sequence[NaiveCommunicator | None] | None = None,
) -> list[NaiveCommunicator]:
    channels = {(a, b): channel() for a in ranks for b in ranks if a != b}
    return [
        NaiveCommunicator(
            rank,
            {b: channels[rank, b] for b in ranks if b != rank},
            {a: channels[a, rank] for a in ranks if a != rank},
            timeout_s,
            None if locals_ is None else locals_[rank],
        )
        for rank in ranks
    ]


def run_ranks(
    function: Callable[[Communicator], Any],
    communicators: Sequence[NaiveCommunicator],
    timeout_s: float,
) -> list[Any]:
    def run_rank(communicator: NaiveCommunicator) -> Any:
        kind, text = "finished", ""
        for end in (communicator, communicator.local):
            end.begin_run()
        try:
            return function(communicator)
        except BaseException as error:
            kind, text = "failed", f"{type(error).__name__}: {say_error(error, str)}"
            raise
        finally:
            for end in (communicator, communicator.local):
                end.end_run(kind, text)

    functions = [partial(run_rank, each) for each in communicators]
    return run_threads(functions, lambda: None, timeout_s)
