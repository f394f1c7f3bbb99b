"""MPIGroup and MPICommunicator: each rank is a process of an MPI job.

mpi4py is imported here, and nowhere else, when a group is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.device import device_of
from gpuopt.distributed.communicator import (
    MessagingCommunicator,
    RankGroup,
    ReduceOp,
    check_root,
    name_gather,
    name_type,
)
from gpuopt.distributed.communicators.exchange import Exchange
from gpuopt.distributed.communicators.headers import (
    INLINE_BYTES,
    Announced,
    Bytes,
    Header,
    Kind,
    Parcel,
)
from gpuopt.distributed.communicators.host import find_neighbours
from gpuopt.distributed.communicators.host_communicator import (
    HostCommunicator,
    Load,
    Sizes,
    check_sendable,
    run_rank,
    stage,
)
from gpuopt.distributed.communicators.launcher import refuse_if_alone
from gpuopt.distributed.communicators.mail import Transfer
from gpuopt.distributed.communicators.mpi_process import (
    check_thread,
    connect,
    end_with_the_job,
    import_mpi,
)
from gpuopt.distributed.communicators.shares import bytes_of, reduce_in_shares
from gpuopt.distributed.waiting import (
    DEFAULT_TIMEOUT_S,
    LONGEST_SLEEP_IN_TRANSFER_S,
    LONGEST_SLEEP_S,
    WaitForRanks,
    check_timeout,
)
from gpuopt.errors import GpuoptError
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.version import __version__

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


class MPIGroup(RankGroup):
    """The processes of an MPI job, as `mpiexec` or `srun` has started them: one rank each.

    Attributes:
        rank: Of this process.
        rank_on_host: Its place among the ranks of its host: the GPU that it may take.
        size, local_size: See `RankGroup`.
    """

    local_size = 1

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, comm: Any = None) -> None:
        """Joins the other ranks, who make the same group; rank 0 prints which processes they are.

        From now on an exception that nobody catches in one rank ends all of them.

        Args:
            timeout_s: How long a rank waits for the others, in seconds.
            comm: A communicator of mpi4py's, which is duplicated; by default `MPI.COMM_WORLD`.

        Raises:
            ImportError: mpi4py, or an MPI, is not installed.
            ValueError: the ranks have different versions of gpuopt.
            DeadlineExceededError: a rank does not make the group.
            RuntimeError: MPI was started in such a way that this thread must not call it; or MPI
                has one process, and the environment shows several.
        """
        check_timeout(timeout_s)
        mpi = import_mpi(timeout_s)
        self._mpi = mpi
        comm = mpi.COMM_WORLD if comm is None else comm
        if comm == mpi.COMM_WORLD:
            advice = "start them by this MPI's own mpiexec, or make a TorchGroup under torchrun"
            refuse_if_alone("MPIGroup", comm.Get_size(), advice)
        exchanges = end_with_the_job(mpi)
        check_thread(mpi)
        self._exchange = Exchange(mpi, connect(mpi, comm, timeout_s, __version__), timeout_s)
        exchanges.append(self._exchange)
        self.rank = self._exchange.rank
        self.size = self._exchange.size
        [(self.rank_on_host, self._exchange.has_core)] = self.run(
            lambda communicator: find_neighbours(communicator, "the start")
        )

    def run(self, function: Callable[[MessagingCommunicator], Any]) -> list[Any]:
        check_thread(self._mpi)

        def call() -> Any:
            communicator = MPICommunicator(self._exchange)
            try:
                return function(communicator)
            finally:
                communicator.messages.let_go()

        return run_rank(self._exchange, call)


class MPICommunicator(HostCommunicator, MessagingCommunicator):
    """A rank that is a process of an MPI job; see `MPIGroup.run`.

    Arrays on GPUs are sent from page-locked memory of the host, and reduced on the host, also where
    the MPI could send them itself: their sums are made on the host in any case. Buckets are by
    default so large that each rank adds up at least 1 MiB of them.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.rank = exchange.rank
        self.size = exchange.size
        self._exchange = exchange
        self.messages = Messages(exchange)

    def _reduce(
        self, sizes: Sizes, load: Load, op: ReduceOp, what: str, details: str = ""
    ) -> list[Any]:
        return reduce_in_shares(self._exchange, sizes, load, op, what, details)

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        blocks = [np.frombuffer(data, np.uint8)]
        parcel = Parcel(data) if len(data) <= INLINE_BYTES else Parcel(blocks=blocks)
        received: list[list[Bytes]] = []

        def allot(headers: Sequence[Header]) -> list[list[Bytes]]:
            received.extend([np.empty(size, np.uint8) for size in each.sizes] for each in headers)
            return received

        headers = self._exchange.exchange(what, [parcel] * self.size, allot)
        of_ranks = zip(headers, received, strict=True)
        pickles = [blocks[0].data if blocks else header.inline for header, blocks in of_ranks]
        return [
            value if rank == self.rank else pickle.loads(data) for rank, data in enumerate(pickles)
        ]

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        device, exchange = slices.device, self._exchange
        values, indices = stage(slices.values, device), stage(slices.indices, device)
        blocks = [bytes_of(values), bytes_of(indices)]
        announced = [Announced(tuple([block.nbytes for block in blocks]))] * self.size
        details = f"by {name_type(indices.dtype)}"
        with exchange.call(name_gather(slices, what), announced, details) as call:
            for rank in exchange.mail.others:
                for block in blocks:
                    call.send(rank, block)
            counts = [header.sizes[1] // indices.itemsize for header in call.meet()]
            all_values = np.empty((sum(counts), *values.shape[1:]), values.dtype)
            all_indices = np.empty(sum(counts), indices.dtype)
            ends = np.cumsum(counts)
            places = [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]
            for rank in exchange.mail.others:
                call.receive(rank, bytes_of(all_values[places[rank]]))
                call.receive(rank, bytes_of(all_indices[places[rank]]))
            # While the others' rows come.
            all_values[places[self.rank]], all_indices[places[self.rank]] = values, indices
        return IndexedSlices(
            to_device(all_values, device), to_device(all_indices, device), slices.dense_shape
        )

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        device = device_of(array)
        is_root = self.rank == root
        # A rank that receives may write to the memory of the array itself.
        is_direct = not is_root and device.kind == "cpu" and array.flags.c_contiguous
        check_sendable(array.dtype)
        if not is_root and device.kind == "cpu" and not array.flags.writeable:
            raise ValueError(f"broadcast from {root} would write to a read-only array")
        host = stage(array, device) if is_root or is_direct else np.empty(array.shape, array.dtype)
        block = bytes_of(host)
        self._exchange.exchange(
            f"broadcast from {root} of {array.dtype}{list(array.shape)}",
            [Parcel(blocks=[block] if is_root else [])] * self.size,
            lambda headers: [[block] if rank == root else [] for rank in range(self.size)],
        )
        if not is_root and not is_direct:
            with backend_for(device).enter():
                array[...] = to_device(host, device)
        return array

    def barrier(self, what: str = "barrier") -> None:
        self._exchange.exchange(what, [Parcel()] * self.size)

    def send(self, value: Any, rank: int) -> None:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank must be another one of {self.size} ranks, got {rank}")
        self.messages.send(rank, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def receive(self, ranks: Iterable[int], timeout_s: float) -> tuple[int, Any] | None:
        received = self.messages.receive(ranks, timeout_s)
        if received is None or isinstance(received[1], GpuoptError):
            return received
        return received[0], pickle.loads(received[1])
