"""Messages among the processes of an MPI job: every call is checked, and every wait ends."""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gpuopt.distributed.communicator import say_error, say_who
from gpuopt.distributed.waiting import WaitForRanks
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError, WorkerFailedError
from gpuopt.locks import renew_after_fork

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What goes with a header in one message; longer blocks follow it in messages of their own.
INLINE_BYTES = 2048
# A count of bytes is an int in MPI before version 4.
_PIECE_BYTES = 2**30

_HEADER_TAG, _BLOCK_TAG = 1, 2
_CALL, _FAILED, _FINISHED, _MESSAGE = range(4)
_HEADER = struct.Struct("<BQQ16sQ")

# While blocks are under way, MPI needs to be called to move them.
_LONGEST_SLEEP_IN_TRANSFER_S = 100e-6
_LONGEST_SLEEP_S = 1e-3

# Later than every run: the number of the last header that a rank sends.
_AFTER_ALL_RUNS = 2**64 - 1
# The number of a message: that of no exchange.
_NO_EXCHANGE = 2**64 - 1


class Parcel(NamedTuple):
    """What one rank sends to another in one exchange.

    Attributes:
        inline: At most INLINE_BYTES.
        blocks: Contiguous memory of any size, which must not change before the exchange is over.
    """

    inline: bytes = b""
    blocks: Sequence[Bytes] = ()


class Header(NamedTuple):
    """The first message of a rank in each exchange, or its last one in a run, or one to one rank.

    Attributes:
        kind: What has happened: a call, the rank's end as failed or finished, or a message.
        run: The number of the group's run.
        number: The number of the exchange in the run.
        digest: Of the call's description.
        sizes: Of the blocks that follow.
        inline: The parcel's, or the text of a failure.
    """

    kind: int
    run: int
    number: int
    digest: bytes
    sizes: tuple[int, ...]
    inline: bytes

    def pack(self) -> bytes:
        fixed = _HEADER.pack(self.kind, self.run, self.number, self.digest, len(self.sizes))
        return fixed + struct.pack(f"<{len(self.sizes)}Q", *self.sizes) + self.inline

    @classmethod
    def unpack(cls, message: bytes) -> Header:
        kind, run, number, digest, num_blocks = _HEADER.unpack_from(message)
        sizes = struct.unpack_from(f"<{num_blocks}Q", message, _HEADER.size)
        return cls(kind, run, number, digest, sizes, message[_HEADER.size + 8 * num_blocks :])


Allot = Callable[[Sequence[Header]], Sequence[Sequence[Bytes]]]


class Exchange:
    """This rank's messages to and from all others.

    In an exchange, each rank sends each other rank a header, and then blocks of bytes. A header
    says which call its rank makes and how many bytes follow, so that whoever expects another call
    can still receive, and drop, all of it: the ranks are in step again for the next call. After a
    deadline or a failure that is so for the next run.

    A rank without anything to do yields its core, and then sleeps for longer and longer.
    """

    def __init__(self, mpi: Any, comm: Any, timeout_s: float) -> None:
        """Takes over a communicator.

        Args:
            mpi: The module `mpi4py.MPI`.
            comm: Its communicator, for these messages alone.
            timeout_s: How long a rank waits for the others, in seconds.
        """
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self._mpi = mpi
        self._comm = comm
        self._timeout_s = timeout_s
        # Sends go to the next ranks first, so that not all of them go to rank 0 at once.
        self._others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._run = 0
        self._is_running = False
        self._is_forked = False
        self._number = 0
        self._status = mpi.Status()
        # By rank, in the order in which they were sent.
        self._arriving: list[deque[tuple[Any, bytearray]]] = [deque() for _ in range(self.size)]
        self._inbox: list[deque[Header]] = [deque() for _ in range(self.size)]
        # Blocks of messages that are coming in, by rank.
        self._incoming: dict[int, list[tuple[Any, Bytes]]] = {}
        # Requests whose end nobody waits for, with the memory that they use.
        self._in_flight: list[tuple[Any, Any]] = []
        # The type and message of the error that ended the run for this rank.
        self._end: tuple[type[GpuoptError], str] | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """MPI belongs to the parent."""
        self._is_forked = True
        text = f"rank {self.rank} is the process that this child was forked from, and not the child"
        self._end = WorkerFailedError, text

    def begin_run(self) -> None:
        """Forgets how the last run ended; what is left of its messages will be dropped.

        Raises:
            RuntimeError: the last run goes on.
            WorkerFailedError: this is a forked child.
        """
        if self._is_forked:
            self._raise_end()
        if self._is_running:
            raise RuntimeError(
                "a group's `run` was called in a `run` of the same group: in it, use its "
                "communicator, and call MirroredStrategy's run, variable and call_once outside"
            )
        self._is_running = True
        self._run += 1
        self._number = 0
        self._end = None

    def end_run(self, error: BaseException | None) -> None:
        """Tells all other ranks that this one has failed, by `error`, or finished."""
        if self._is_forked:
            return
        self._is_running = False
        for blocks in self._incoming.values():
            self._in_flight += blocks
        self._incoming.clear()
        self._tell_end(self._run, error)
        self._finish(CancelledError, f"the run of rank {self.rank} is over")

    def leave(self, error: BaseException | None) -> None:
        """Tells all other ranks that this process ends, by `error` or not, and joins no run."""
        self._tell_end(_AFTER_ALL_RUNS, error)

    def has_reported(self, error: BaseException) -> bool:
        """Says whether an error only tells of another rank that has failed or finished."""
        is_told = isinstance(error, WorkerFailedError | CancelledError)
        return is_told and self._end == (type(error), str(error))

    def ranks_still_there(self) -> list[int]:
        """Returns who has not left yet, or has not received all that was sent to it."""
        self._poll()
        for rank, inbox in enumerate(self._inbox):
            while inbox and inbox[0].run != _AFTER_ALL_RUNS:
                self._drop(rank, inbox.popleft())
        there = [rank for rank in self._others if not self._inbox[rank]]
        return sorted(self._others) if self._in_flight and not there else there

    def _tell_end(self, run: int, error: BaseException | None) -> None:
        kind, text = _FINISHED, ""
        if error is not None:
            kind = _FAILED
            text = f"rank {self.rank} has failed: {type(error).__name__}: {say_error(error, str)}"
            if isinstance(error, WorkerFailedError):
                text = str(error)  # names the rank that failed first
        header = Header(kind, run, self._number, b"", (), text.encode()[:INLINE_BYTES])
        for rank in self._others:
            self._send_header(rank, header)

    def exchange(
        self,
        what: str,
        parcels: Sequence[Parcel],
        allot: Allot | None = None,
        details: str = "",
    ) -> list[Header]:
        """Sends each rank its parcel, and receives one from each.

        Args:
            what: Describes the call, for errors.
            parcels: For each rank; that for this one stays here.
            allot: Is given all ranks' headers, and returns where the blocks of each are to be
                received; those of this rank are ignored. By default there are no blocks.
            details: What else must be the same on all ranks; told in the error if it is not.

        Returns:
            The headers of all ranks.

        Raises:
            ValueError: the ranks make different calls.
            DeadlineExceededError: a rank does not come in time.
            WorkerFailedError: a rank has failed.
            CancelledError: a rank has finished.
        """
        try:
            return self._exchange(what, parcels, allot, details)
        except self._mpi.Exception as error:
            self._refuse(what, error)

    def send(self, rank: int, data: bytes) -> None:
        """Sends a message to one rank, which must `receive` it; never waits.

        Raises:
            WorkerFailedError: MPI has failed.
            CancelledError: the run is over.
        """
        self._raise_end()
        is_inline = len(data) <= INLINE_BYTES
        sizes, inline = ((), data) if is_inline else ((len(data),), b"")
        try:
            self._send_header(rank, Header(_MESSAGE, self._run, _NO_EXCHANGE, b"", sizes, inline))
            if not is_inline:
                block = np.frombuffer(data, np.uint8)
                self._in_flight += self._move(self._comm.Isend, block, rank)
        except self._mpi.Exception as error:
            self._refuse("send", error)

    def receive(
        self, ranks: Iterable[int], timeout_s: float
    ) -> tuple[int, bytes | GpuoptError] | None:
        """Waits for a message of one of several ranks.

        A rank that is still sending does not hold up the others.

        Args:
            ranks: Whose messages count; of two that are there, the first one's is returned.
            timeout_s: How long to wait, in seconds.

        Returns:
            (rank, message), or None if none has come in time. In place of a message, a rank that
            has failed or finished gives the error that says so, each time it is asked.

        Raises:
            ValueError: a rank makes another call.
            WorkerFailedError: MPI has failed.
            CancelledError: the run is over.
        """
        waiting = WaitForRanks("receive", timeout_s)
        try:
            while True:
                self._raise_end()
                self._poll()
                for rank in ranks:
                    message = self._take_message(rank)
                    if message is not None:
                        return rank, message
                longest_s = _LONGEST_SLEEP_IN_TRANSFER_S if self._incoming else _LONGEST_SLEEP_S
                if not waiting.pause(longest_s):
                    return None
        except self._mpi.Exception as error:
            self._refuse("receive", error)

    def _exchange(
        self, what: str, parcels: Sequence[Parcel], allot: Allot | None, details: str
    ) -> list[Header]:
        self._raise_end()
        number, self._number = self._number, self._number + 1
        call = f"{what} {details}".rstrip()
        digest = hashlib.blake2b(call.encode(), digest_size=16).digest()
        waiting = WaitForRanks(what, self._timeout_s)
        sends = []
        headers: list[Header | None] = [None] * self.size
        for rank in (*self._others, self.rank):
            sizes = tuple(block.nbytes for block in parcels[rank].blocks)
            header = Header(_CALL, self._run, number, digest, sizes, parcels[rank].inline)
            if rank == self.rank:
                headers[rank] = header
                continue
            self._send_header(rank, header)
            for block in parcels[rank].blocks:
                sends += self._move(self._comm.Isend, block, rank)
        try:
            come = self._receive_headers(headers, number, waiting)
            is_same = all(header.digest == digest for header in come)
            targets = allot(come) if is_same and allot is not None else []
        except BaseException:
            self._give_up(sends, headers)
            raise
        if not is_same:
            self._give_up(sends, headers)
            brought = say_who(self._gather_calls(call))
            raise ValueError(f"all ranks must make the same call, got {brought}")
        receives = []
        for rank, of_rank in enumerate(targets):
            if rank != self.rank:
                for target in of_rank:
                    receives += self._move(self._comm.Irecv, target, rank)
        self._complete([*sends, *receives], waiting)
        return come

    def _gather_calls(self, call: str) -> list[str]:
        """Returns what each rank has called."""
        block = np.frombuffer(call.encode(), np.uint8)
        received: list[list[Bytes]] = []

        def allot(headers: Sequence[Header]) -> list[list[Bytes]]:
            received.extend([np.empty(each.sizes[0], np.uint8)] for each in headers)
            received[self.rank] = [block]
            return received

        self._exchange("the calls that differ", [Parcel(blocks=[block])] * self.size, allot, "")
        return [text.tobytes().decode() for [text] in received]

    def _receive_headers(
        self, headers: list[Header | None], number: int, waiting: WaitForRanks
    ) -> list[Header]:
        """Fills in the other ranks' headers of exchange `number`, and returns all of them."""
        while True:
            self._poll()
            for rank in self._others:
                if headers[rank] is None:
                    headers[rank] = self._next_header(rank, number)
            self._raise_end()
            come = [header for header in headers if header is not None]
            if len(come) == self.size:
                return come
            missing = [rank for rank, header in enumerate(headers) if header is None]
            if not waiting.pause(_LONGEST_SLEEP_S, missing):
                self._finish(
                    DeadlineExceededError,
                    f"{waiting.what}: rank {', '.join(map(str, missing))} did not come within "
                    f"{self._timeout_s:g} s",
                )

    def _next_header(self, rank: int, number: int) -> Header | None:
        """Takes a rank's header of an exchange out of its inbox, and drops what came before."""
        inbox = self._inbox[rank]
        while inbox:
            header = inbox[0]
            end = self._find_end(rank, header)
            if end is not None:
                self._finish(type(end), str(end))
                return None
            inbox.popleft()
            if header.run == self._run and header.number == number:
                return header
            self._drop(rank, header)
        return None

    def _find_end(self, rank: int, header: Header) -> GpuoptError | None:
        """Returns the error if a header says that its rank has failed or finished."""
        if header.run >= self._run and header.kind == _FAILED:
            return WorkerFailedError(header.inline.decode(errors="replace"))
        if header.run > self._run or (header.run == self._run and header.kind == _FINISHED):
            return CancelledError(f"rank {rank} has finished, and will not come")
        return None

    def _take_message(self, rank: int) -> bytes | GpuoptError | None:
        """Takes a rank's next message out of its inbox if all of it is there, or the rank's end."""
        inbox = self._inbox[rank]
        while rank not in self._incoming and inbox:
            header = inbox[0]
            end = self._find_end(rank, header)
            if end is not None:
                return end
            inbox.popleft()
            if header.run == self._run and header.kind == _MESSAGE:
                if not header.sizes:
                    return header.inline
                block = np.empty(header.sizes[0], np.uint8)
                self._incoming[rank] = self._move(self._comm.Irecv, block, rank)
            else:
                self._drop(rank, header)
                if header.run == self._run:
                    raise ValueError(f"rank {rank} makes another call than to send a message")
        pieces = self._incoming.get(rank)
        if pieces is None or not self._mpi.Request.Testall([request for request, _ in pieces]):
            return None
        del self._incoming[rank]
        return b"".join(piece.tobytes() for _, piece in pieces)

    def _complete(self, requests: list[tuple[Any, Any]], waiting: WaitForRanks) -> None:
        """Waits until all blocks have been sent and received."""
        pending = requests
        try:
            while pending:
                done = self._mpi.Request.Testsome([request for request, _ in pending])
                if done:
                    pending = [each for i, each in enumerate(pending) if i not in set(done)]
                    waiting.has_progress()
                    continue
                self._poll()
                self._look_for_failure()
                if not waiting.pause(_LONGEST_SLEEP_IN_TRANSFER_S):
                    self._finish(
                        DeadlineExceededError,
                        f"{waiting.what} was not done within {self._timeout_s:g} s",
                    )
                self._raise_end()
        finally:
            self._in_flight += pending

    def _look_for_failure(self) -> None:
        """Ends the run if a rank has failed, whatever it sent before that."""
        for rank in self._others:
            for header in self._inbox[rank]:
                if header.kind == _FAILED and header.run >= self._run:
                    self._finish(WorkerFailedError, header.inline.decode(errors="replace"))

    def _poll(self) -> None:
        """Receives all headers that have come, and lets go of what has been sent."""
        mpi = self._mpi
        while (
            message := self._comm.Improbe(mpi.ANY_SOURCE, _HEADER_TAG, self._status)
        ) is not None:
            text = bytearray(self._status.Get_count(mpi.BYTE))
            # Not Recv: the sender may be needed for the rest of it, and be busy.
            request = message.Irecv([text, mpi.BYTE])
            self._arriving[self._status.Get_source()].append((request, text))
        for arriving, inbox in zip(self._arriving, self._inbox, strict=True):
            while arriving and arriving[0][0].Test():
                inbox.append(Header.unpack(bytes(arriving.popleft()[1])))
        if self._in_flight:
            self._in_flight = [each for each in self._in_flight if not each[0].Test()]

    def _send_header(self, rank: int, header: Header) -> None:
        text = header.pack()
        request = self._comm.Isend([text, self._mpi.BYTE], rank, _HEADER_TAG)
        if not request.Test():
            self._in_flight.append((request, text))

    def _move(
        self, start: Callable[[Any, int, int], Any], block: Bytes, rank: int
    ) -> list[tuple[Any, Any]]:
        pieces = [block[i : i + _PIECE_BYTES] for i in range(0, block.nbytes, _PIECE_BYTES)]
        return [(start([piece, self._mpi.BYTE], rank, _BLOCK_TAG), piece) for piece in pieces]

    def _give_up(self, sends: list[tuple[Any, Any]], headers: Sequence[Header | None]) -> None:
        """Leaves an exchange: nobody waits for its blocks, and what comes is dropped."""
        self._in_flight += sends
        for rank, header in enumerate(headers):
            if header is not None and rank != self.rank:
                self._drop(rank, header)

    def _drop(self, rank: int, header: Header) -> None:
        """Receives the blocks of a header for nobody."""
        for size in header.sizes:
            self._in_flight += self._move(self._comm.Irecv, np.empty(size, np.uint8), rank)

    def _refuse(self, what: str, error: Exception) -> NoReturn:
        """Ends the run because of an error of MPI's."""
        self._finish(WorkerFailedError, f"{what}: MPI has failed: {error}")
        self._raise_end()
        raise error

    def _finish(self, error: type[GpuoptError], message: str) -> None:
        if self._end is None:
            self._end = error, message

    def _raise_end(self) -> None:
        if self._end is not None:
            error, message = self._end
            raise error(message)
