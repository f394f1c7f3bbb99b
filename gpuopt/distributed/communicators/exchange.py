"""Messages among the processes of an MPI job: every call is checked, and every wait ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from gpuopt.distributed.communicator import say_error, say_who
from gpuopt.distributed.communicators.headers import (
    INLINE_BYTES,
    Announced,
    Bytes,
    Header,
    Kind,
    Parcel,
    digest_of,
)
from gpuopt.distributed.communicators.mail import Mail, Transfer
from gpuopt.distributed.waiting import (
    LONGEST_SLEEP_IN_TRANSFER_S,
    LONGEST_SLEEP_S,
    WaitForRanks,
)
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError, WorkerFailedError
from gpuopt.locks import renew_after_fork

# Most blocks come soon, and one test takes far less than a pause.
_TESTS_BEFORE_PAUSE = 10

# Later than every run: the number of the last header that a rank sends.
_AFTER_ALL_RUNS = 2**64 - 1

Allot = Callable[[Sequence[Header]], Sequence[Sequence[Bytes]]]


class Exchange:
    """This rank's messages to and from all others.

    In an exchange, each rank sends each other rank a header, and then blocks of bytes. A header
    says which call its rank makes and how many bytes follow, so that whoever expects another call
    can still receive, and drop, all of it: the ranks are in step again for the next call. After a
    deadline or a failure that is so for the next run.

    A rank without anything to do yields its core, and then sleeps for longer and longer.

    Attributes:
        rank: This one.
        size: How many ranks there are.
        is_running: Whether a run goes on; whoever has begun it sets this to False.
        mail: What it sends and receives.
        mpi: The module `mpi4py.MPI`.
        run: The number of the run.
        has_core: Whether there is a core for each rank of this host.
    """

    def __init__(self, mpi: Any, comm: Any, timeout_s: float) -> None:
        """Takes over a communicator of mpi4py's, for these messages alone."""
        self.mail = Mail(mpi, comm)
        self.rank = self.mail.rank
        self.size = self.mail.size
        self.mpi = mpi
        self._timeout_s = timeout_s
        self.has_core = True
        self.run = 0
        self.is_running = False
        self._is_forked = False
        self._number = 0
        # The type and message of the error that ended the run for this rank.
        self._end: tuple[type[GpuoptError], str] | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """MPI belongs to the parent."""
        self._is_forked = True
        text = f"rank {self.rank} is the process that this child was forked from, and not the child"
        self._end = WorkerFailedError, text

    def check_no_run(self) -> None:
        """Raises an error if a run cannot begin.

        Raises:
            RuntimeError: the last run goes on.
            WorkerFailedError: this is a forked child.
        """
        if self._is_forked:
            self.raise_end()
        if self.is_running:
            raise RuntimeError(
                "a group's `run` was called in a `run` of the same group: in it, use its "
                "communicator, and call MirroredStrategy's run and variable outside"
            )

    def begin_run(self) -> None:
        """Forgets how the last run ended; what is left of its messages will be dropped."""
        self.is_running = True
        self.run += 1
        self._number = 0
        self._end = None

    def end_run(self, error: BaseException | None) -> None:
        """Tells all other ranks that this one has failed, by `error`, or finished."""
        if self._is_forked:
            return
        self._tell_end(self.run, error)
        self._finish(CancelledError, f"the run of rank {self.rank} is over")

    def leave(self, error: BaseException | None) -> None:
        """Tells all other ranks that this process ends, by `error` or not, and joins no run."""
        self._tell_end(_AFTER_ALL_RUNS, error)

    def has_reported(self, error: BaseException) -> bool:
        """Says whether an error only tells of another rank that has failed or finished."""
        is_told = isinstance(error, WorkerFailedError | CancelledError)
        return is_told and self._end == (type(error), str(error))

    def exit_status(self) -> int | None:
        """Returns the status that another rank has ended a run with, if it did so by `sys.exit`."""
        if self._is_forked:
            return None
        self.mail.poll()
        headers = (header for inbox in self.mail.inbox for header in inbox)
        told = [header.digest[0] for header in headers if header.kind == Kind.FAILED]
        return max(told, default=0) or None

    def ranks_still_there(self) -> list[int]:
        """Returns who has not left yet, or has not received all that was sent to it."""
        self.mail.poll()
        for rank, inbox in enumerate(self.mail.inbox):
            while inbox and inbox[0].run != _AFTER_ALL_RUNS:
                self.mail.drop(rank, inbox.popleft().sizes)
        there = [rank for rank in self.mail.others if not self.mail.inbox[rank]]
        return sorted(self.mail.others) if self.mail.in_flight and not there else there

    def _tell_end(self, run: int, error: BaseException | None) -> None:
        kind, text, status = Kind.FINISHED, "", 0
        if isinstance(error, SystemExit):
            status = _exit_status(error)
        if error is not None and (status or not isinstance(error, SystemExit)):
            kind = Kind.FAILED
            text = f"rank {self.rank} has failed: {type(error).__name__}: {say_error(error, str)}"
            if isinstance(error, WorkerFailedError):
                text = str(error)  # names the rank that failed first
                status = self.exit_status() or 0
        header = Header(kind, run, self._number, bytes([status]), (), text.encode()[:INLINE_BYTES])
        for rank in self.mail.others:
            self.mail.send_header(rank, header)

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
        announced = [
            Announced(tuple([block.nbytes for block in parcel.blocks]), parcel.inline)
            for parcel in parcels
        ]
        with self.call(what, announced, details) as call:
            for rank in self.mail.others:
                for block in parcels[rank].blocks:
                    call.send(rank, block)
            headers = call.meet()
            if allot is not None:
                for rank, targets in enumerate(allot(headers)):
                    if rank != self.rank:
                        for target in targets:
                            call.receive(rank, target)
        return headers

    def call(self, what: str, announced: Sequence[Announced], details: str = "") -> Call:
        """Begins a call in which blocks are sent and received one after the other; see `exchange`.

        Returns:
            A context, which sends headers at its beginning, and at its end waits for all blocks
            that are on their way. It raises what `exchange` does.
        """
        self.raise_end()
        number, self._number = self._number, self._number + 1
        description = f"{what} {details}".rstrip()
        digest = digest_of(description)
        headers = [Header(Kind.CALL, self.run, number, digest, *each) for each in announced]
        return Call(self, description, headers, WaitForRanks(what, self._timeout_s, self.has_core))

    def break_off(self, what: str, error: BaseException, is_announced: bool) -> None:
        """Ends the run if an error in a call keeps this rank from what it has announced to others.

        Raises:
            WorkerFailedError: it is an error of MPI's.
        """
        if is_announced:
            self._tell_end(self.run, error)
            self._finish(WorkerFailedError, f"rank {self.rank} has given up {what}")
        if isinstance(error, self.mpi.Exception):
            self.refuse(what, error)

    def gather_calls(self, description: str) -> list[str]:
        """Returns what each rank has called."""
        block = np.frombuffer(description.encode(), np.uint8)
        received: list[list[Bytes]] = []

        def allot(headers: Sequence[Header]) -> list[list[Bytes]]:
            received.extend([np.empty(each.sizes[0], np.uint8)] for each in headers)
            received[self.rank] = [block]
            return received

        self.exchange("the calls that differ", [Parcel(blocks=[block])] * self.size, allot)
        return [text.tobytes().decode() for [text] in received]

    def receive_headers(
        self, headers: list[Header | None], number: int, waiting: WaitForRanks
    ) -> list[Header]:
        """Fills in the other ranks' headers of call `number`, and returns all of them."""
        while True:
            self.mail.poll()
            for rank in self.mail.others:
                if headers[rank] is None:
                    headers[rank] = self._next_header(rank, number)
            self.raise_end()
            come = [header for header in headers if header is not None]
            if len(come) == self.size:
                waiting.note_arrival()
                return come
            missing = [rank for rank, header in enumerate(headers) if header is None]
            if not waiting.pause(LONGEST_SLEEP_S, missing):
                self._finish(
                    DeadlineExceededError,
                    f"{waiting.what}: rank {', '.join(map(str, missing))} did not come within "
                    f"{self._timeout_s:g} s",
                )

    def complete(self, transfers: Sequence[Transfer], waiting: WaitForRanks) -> None:
        """Waits until blocks have been sent and received."""
        pending = [transfer for transfer in transfers if transfer.request]
        requests = [transfer.request for transfer in pending]
        statuses = [self.mpi.Status() for _ in requests]
        tests = 0
        while not self.mpi.Request.Testall(requests, statuses):
            tests += 1
            if tests % _TESTS_BEFORE_PAUSE == 0:
                self._pause(waiting)
        for transfer, status in zip(pending, statuses, strict=True):
            if transfer.source is not None:
                received = status.Get_count(self.mpi.BYTE)
                while received < transfer.memory.nbytes:
                    # It has given up, and says why in a header.
                    self._pause(waiting, [transfer.source])
        waiting.note_arrival()

    def find_end(self, rank: int, header: Header) -> GpuoptError | None:
        """Returns the error if a header says that its rank has failed or finished."""
        if header.run >= self.run and header.kind == Kind.FAILED:
            return WorkerFailedError(header.inline.decode(errors="replace"))
        if header.run > self.run or (header.run == self.run and header.kind == Kind.FINISHED):
            return CancelledError(f"rank {rank} has finished, and will not come")
        return None

    def raise_end(self) -> None:
        """Raises the error that has ended the run for this rank, if one has."""
        if self._end is not None:
            error, message = self._end
            raise error(message)

    def refuse(self, what: str, error: Exception) -> NoReturn:
        """Ends the run because of an error of MPI's."""
        self._finish(WorkerFailedError, f"{what}: MPI has failed: {error}")
        self.raise_end()
        raise error

    def _next_header(self, rank: int, number: int) -> Header | None:
        """Takes a rank's header of an exchange out of its inbox, and drops what came before."""
        inbox = self.mail.inbox[rank]
        while inbox:
            header = inbox[0]
            end = self.find_end(rank, header)
            if end is not None:
                self._finish(type(end), str(end))
                return None
            inbox.popleft()
            if header.run == self.run and header.number == number:
                return header
            self.mail.drop(rank, header.sizes)
        return None

    def _pause(self, waiting: WaitForRanks, missing: Sequence[int] = ()) -> None:
        """Lets time pass in which ranks may send; raises if one has failed, or time is over."""
        self.mail.poll()
        self._look_for_failure()
        if not waiting.pause(LONGEST_SLEEP_IN_TRANSFER_S, missing):
            self._finish(
                DeadlineExceededError, f"{waiting.what} was not done within {self._timeout_s:g} s"
            )
        self.raise_end()

    def _look_for_failure(self) -> None:
        """Ends the run if a rank has failed, whatever it sent before that."""
        for rank in self.mail.others:
            for header in self.mail.inbox[rank]:
                if header.kind == Kind.FAILED and header.run >= self.run:
                    self._finish(WorkerFailedError, header.inline.decode(errors="replace"))

    def _finish(self, error: type[GpuoptError], message: str) -> None:
        if self._end is None:
            self._end = error, message


class Call:
    """A call while it goes on; `Exchange.call` makes it.

    In its header, each rank announces how many blocks of how many bytes it will send to each other
    rank. Blocks are sent and received in the order in which they were announced.
    A rank that gives up sends empty blocks in place of the others, and receives, for nobody, what
    was announced to it: so that all ranks are in step again for the next call.
    """

    def __init__(
        self, exchange: Exchange, description: str, headers: Sequence[Header], waiting: WaitForRanks
    ) -> None:
        """Prepares the call.

        Args:
            exchange: Whose call this is.
            description: What must be the same on all ranks.
            headers: What is sent to each rank first.
            waiting: The wait for all other ranks.
        """
        self._exchange = exchange
        self._mail = exchange.mail
        self._description = description
        self._mine = headers
        self._waiting = waiting
        self._headers: list[Header | None] = [None] * exchange.size
        self._headers[exchange.rank] = headers[exchange.rank]
        # Of the blocks that have been announced to, and by, each rank.
        self._num_sent: dict[int, int] = {}
        self._num_received = [0] * exchange.size
        self._transfers: list[Transfer] = []

    def __enter__(self) -> Call:
        try:
            for rank in self._mail.others:
                self._mail.send_header(rank, self._mine[rank])
                self._num_sent[rank] = 0
        except BaseException as error:
            self._break_off(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._break_off(error)
            return
        try:
            self._exchange.complete(self._transfers, self._waiting)
        except BaseException as late:
            self._break_off(late)
            raise

    def send(self, rank: int, block: Bytes) -> None:
        """Begins to send the next announced block; its memory must not change from now on."""
        self._num_sent[rank] += 1
        self._transfers += self._mail.begin_send(rank, block)

    def meet(self) -> list[Header]:
        """Returns all ranks' headers, when they have come.

        Raises:
            ValueError: the ranks make different calls.
        """
        number = self._mine[0].number
        headers = self._exchange.receive_headers(self._headers, number, self._waiting)
        if any(header.digest != headers[0].digest for header in headers):
            self._give_up()
            brought = say_who(self._exchange.gather_calls(self._description))
            raise ValueError(f"all ranks must make the same call, got {brought}")
        return headers

    def receive(self, rank: int, target: Bytes) -> list[Transfer]:
        """Begins to receive the next block of a rank; to be called after `meet`."""
        self._num_received[rank] += 1
        transfers = self._mail.begin_receive(rank, target)
        self._transfers += transfers
        return transfers

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Waits until blocks have been received.

        Raises:
            WorkerFailedError: a rank has given up.
        """
        self._exchange.complete(transfers, self._waiting)

    def _break_off(self, error: BaseException) -> None:
        is_announced = self._give_up()
        self._exchange.break_off(self._waiting.what, error, is_announced)

    def _give_up(self) -> bool:
        """Leaves the call: nobody waits for its blocks any more.

        Returns:
            Whether other ranks get empty blocks in place of announced ones.
        """
        self._mail.let_go(self._transfers)
        self._transfers = []
        has_unsent = False
        for rank, num_sent in self._num_sent.items():
            for size in self._mine[rank].sizes[num_sent:]:
                has_unsent |= self._mail.send_empty(rank, size)
        self._num_sent = {}
        for rank, header in enumerate(self._headers):
            if header is not None and rank != self._exchange.rank:
                self._mail.drop(rank, header.sizes[self._num_received[rank] :])
                self._headers[rank] = None
        return has_unsent


def _exit_status(error: SystemExit) -> int:
    """Returns the status that a process ends with by this, as Python does: 1 for a message."""
    if isinstance(error.code, int):
        return error.code & 0xFF
    return 0 if error.code is None else 1
