"""One call of all ranks: whatever becomes of it, what was announced is sent and received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuopt.distributed.communicator import say_who
from gpuopt.distributed.communicators.headers import Bytes, Header
from gpuopt.distributed.communicators.mail import Transfer
from gpuopt.distributed.waiting import WaitForRanks

if TYPE_CHECKING:
    from gpuopt.distributed.communicators.exchange import Exchange


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
