"""Headers and blocks on their way between the processes of an MPI job; nothing here waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.distributed.communicators.headers import Bytes, Header

# A count of bytes is an int in MPI before version 4.
_PIECE_BYTES = 2**30

_HEADER_TAG, _BLOCK_TAG = 1, 2


class Transfer(NamedTuple):
    """A block, or a piece of one, on its way.

    Attributes:
        request: MPI's.
        memory: Where the bytes are, or will be.
        source: The rank that sends it, if it is not this one.
    """

    request: Any
    memory: Bytes
    source: int | None


class Mail:
    """What this rank sends to, and receives from, all others.

    Attributes:
        rank: This one.
        size: How many ranks there are.
        others: All but this one, in the order in which they are sent to.
        inbox: Headers that have come and not been read, by rank.
        in_flight: Requests whose end nobody waits for, with the memory that they use.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        """Takes over a communicator of mpi4py's, for these messages alone."""
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        # Sends go to the next ranks first, so that not all of them go to rank 0 at once.
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self.inbox: list[deque[Header]] = [deque() for _ in range(self.size)]
        self.in_flight: list[tuple[Any, Any]] = []
        self._mpi = mpi
        self._comm = comm
        self._status = mpi.Status()
        # Headers that are coming in, by rank, in the order in which they were sent.
        self._arriving: list[deque[tuple[Any, bytearray]]] = [deque() for _ in range(self.size)]

    def poll(self) -> None:
        """Receives all headers that have come, and lets go of what has been sent."""
        mpi = self._mpi
        while (
            message := self._comm.Improbe(mpi.ANY_SOURCE, _HEADER_TAG, self._status)
        ) is not None:
            text = bytearray(self._status.Get_count(mpi.BYTE))
            # Not Recv: the sender may be needed for the rest of it, and be busy.
            request = message.Irecv([text, mpi.BYTE])
            self._arriving[self._status.Get_source()].append((request, text))
        for arriving, inbox in zip(self._arriving, self.inbox, strict=True):
            while arriving and arriving[0][0].Test():
                inbox.append(Header.unpack(bytes(arriving.popleft()[1])))
        if self.in_flight:
            self.in_flight = [each for each in self.in_flight if not each[0].Test()]

    def send_header(self, rank: int, header: Header) -> None:
        text = header.pack()
        request = self._comm.Isend([text, self._mpi.BYTE], rank, _HEADER_TAG)
        if not request.Test():
            self.in_flight.append((request, text))

    def _move(
        self, start: Callable[[Any, int, int], Any], block: Bytes, rank: int
    ) -> list[tuple[Any, Any]]:
        if 0 < block.nbytes <= _PIECE_BYTES:
            return [(start([block, self._mpi.BYTE], rank, _BLOCK_TAG), block)]
        pieces = [block[i : i + _PIECE_BYTES] for i in range(0, block.nbytes, _PIECE_BYTES)]
        return [(start([piece, self._mpi.BYTE], rank, _BLOCK_TAG), piece) for piece in pieces]

    def begin_send(self, rank: int, block: Bytes) -> list[Transfer]:
        return [Transfer(*each, None) for each in self._move(self._comm.Isend, block, rank)]

    def begin_receive(self, rank: int, target: Bytes) -> list[Transfer]:
        return [Transfer(*each, rank) for each in self._move(self._comm.Irecv, target, rank)]

    def send_empty(self, rank: int, size: int) -> bool:
        """Sends nothing in place of a block; returns whether it has any bytes."""
        nothing = np.empty(0, np.uint8)
        for _ in range(0, size, _PIECE_BYTES):
            request = self._comm.Isend([nothing, self._mpi.BYTE], rank, _BLOCK_TAG)
            self.in_flight.append((request, nothing))
        return size > 0

    def let_go(self, transfers: Sequence[Transfer]) -> None:
        """Keeps the memory of blocks until they have been sent or received; nobody waits."""
        self.in_flight += [(transfer.request, transfer.memory) for transfer in transfers]

    def drop(self, rank: int, sizes: Sequence[int]) -> None:
        """Receives blocks for nobody."""
        for size in sizes:
            self.in_flight += self._move(self._comm.Irecv, np.empty(size, np.uint8), rank)
