"""Messages from one rank to another, beside the exchanges of all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpuopt.distributed.communicators.exchange import Exchange
from gpuopt.distributed.communicators.headers import INLINE_BYTES, Header, Kind
from gpuopt.distributed.communicators.mail import Transfer
from gpuopt.distributed.waiting import (
    LONGEST_SLEEP_IN_TRANSFER_S,
    LONGEST_SLEEP_S,
    WaitForRanks,
)
from gpuopt.errors import GpuoptError

# The number of a message: that of no exchange.
_NO_EXCHANGE = 2**64 - 1


class Messages:
    """This rank's messages to single ranks, and from them, in one run."""

    def __init__(self, exchange: Exchange) -> None:
        """Begins without any, over this rank's exchange."""
        self._exchange = exchange
        self._mail = exchange.mail
        self._mpi = exchange.mpi
        # Blocks that are coming in, by rank.
        self._incoming: dict[int, list[Transfer]] = {}

    def send(self, rank: int, data: bytes) -> None:
        """Sends a message to one rank, which must `receive` it; never waits.

        Raises:
            WorkerFailedError: MPI has failed.
            CancelledError: the run is over.
        """
        self._exchange.raise_end()
        is_inline = len(data) <= INLINE_BYTES
        sizes, inline = ((), data) if is_inline else ((len(data),), b"")
        try:
            self._mail.send_header(
                rank, Header(Kind.MESSAGE, self._exchange.run, _NO_EXCHANGE, b"", sizes, inline)
            )
            if not is_inline:
                block = np.frombuffer(data, np.uint8)
                self._mail.let_go(self._mail.begin_send(rank, block))
        except self._mpi.Exception as error:
            self._exchange.refuse("send", error)

    def receive(
        self, ranks: Iterable[int], timeout_s: float
    ) -> tuple[int, bytes | GpuoptError] | None:
        """Does what `MessagingCommunicator.receive` does, of pickled objects.

        A rank that is still sending does not hold up the others.

        Raises:
            ValueError: a rank makes another call.
            WorkerFailedError: MPI has failed.
            CancelledError: the run is over.
        """
        waiting = WaitForRanks("receive", timeout_s, self._exchange.has_core)
        ranks = tuple(ranks)  # which are asked again and again
        try:
            while True:
                self._exchange.raise_end()
                self._mail.poll()
                for rank in ranks:
                    message = self._take_message(rank)
                    if message is not None:
                        return rank, message
                longest_s = LONGEST_SLEEP_IN_TRANSFER_S if self._incoming else LONGEST_SLEEP_S
                if not waiting.pause(longest_s):
                    return None
        except self._mpi.Exception as error:
            self._exchange.refuse("receive", error)

    def let_go(self) -> None:
        """Waits for no message of this run any more."""
        for blocks in self._incoming.values():
            self._mail.let_go(blocks)
        self._incoming.clear()

    def _take_message(self, rank: int) -> bytes | GpuoptError | None:
        """Takes a rank's next message out of its inbox if all of it is there, or the rank's end."""
        inbox = self._mail.inbox[rank]
        while rank not in self._incoming and inbox:
            header = inbox[0]
            end = self._exchange.find_end(rank, header)
            if end is not None:
                return end
            inbox.popleft()
            if header.run == self._exchange.run and header.kind == Kind.MESSAGE:
                if not header.sizes:
                    return header.inline
                block = np.empty(header.sizes[0], np.uint8)
                self._incoming[rank] = self._mail.begin_receive(rank, block)
            else:
                self._mail.drop(rank, header.sizes)
                if header.run == self._exchange.run:
                    raise ValueError(f"rank {rank} makes another call than to send a message")
        pieces = self._incoming.get(rank)
        if pieces is None or not self._mpi.Request.Testall([piece.request for piece in pieces]):
            return None
        del self._incoming[rank]
        return b"".join(piece.memory.tobytes() for piece in pieces)
