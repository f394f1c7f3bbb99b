"""TorchGroup and TorchCommunicator: each rank is a process of a torch.distributed job.

torch is imported here, and only when a group is made. Bytes go over its backend gloo, after a
`StoreMeeting` has compared the ranks' calls.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.device import device_of
from gpuopt.distributed.communicator import (
    Communicator,
    RankGroup,
    ReduceOp,
    check_root,
    name_gather,
    name_type,
)
from gpuopt.distributed.communicators.headers import INLINE_BYTES, Bytes
from gpuopt.distributed.communicators.host import find_neighbours
from gpuopt.distributed.communicators.host_communicator import (
    HostCommunicator,
    Load,
    Sizes,
    check_sendable,
    run_rank,
    stage,
)
from gpuopt.distributed.communicators.launcher import place_in_job, refuse_if_alone
from gpuopt.distributed.communicators.shares import bytes_of, fold
from gpuopt.distributed.communicators.store_meeting import StoreMeeting
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, check_timeout
from gpuopt.errors import DeadlineExceededError, WorkerFailedError
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.version import __version__

# The number of groups that were made of each process group.
_num_groups: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

# How long a process with the store waits for the others after an uncaught exception.
_GRACE_S = 3.0


class TorchGroup(RankGroup):
    """The processes of a torch.distributed job, as `torchrun` has started them: one rank each.

    Attributes:
        rank: Of this process.
        rank_on_host: Its place among the ranks of its host: the GPU that it may take.
        size, local_size: See `RankGroup`.
    """

    local_size = 1

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, process_group: Any = None) -> None:
        """Joins the other ranks, which make the same group; rank 0 prints the processes of all.

        If the program has not started torch.distributed, starts it with the backend gloo, with the
        rank and the number of ranks from the launcher's environment variables. The ranks meet at
        `MASTER_ADDR` and `MASTER_PORT`, which torchrun sets. Without a launcher, the group has one
        rank.

        Args:
            timeout_s: How long a rank waits for the others, in seconds.
            process_group: A group of torch.distributed's of the backend gloo; by default a new one
                of all ranks, whatever backend the program has chosen for its models.

        Raises:
            ImportError: torch is not installed, or has no torch.distributed.
            ValueError: the ranks have different versions of gpuopt.
            DeadlineExceededError: a rank does not make the group.
            RuntimeError: torch.distributed has one process, and the environment shows several.
        """
        check_timeout(timeout_s)
        torch = _import_torch()
        dist, timeout = torch.distributed, timedelta(seconds=timeout_s)
        must_destroy = not dist.is_initialized()
        if must_destroy:
            with _within(timeout_s):
                _start(dist, timeout)
        if process_group is None:
            advice = "start torch.distributed with all of them, or leave that to TorchGroup()"
            refuse_if_alone("TorchGroup", dist.get_world_size(), advice)
            with _within(timeout_s):
                process_group = dist.new_group(timeout=timeout, backend="gloo")
        ranks = dist.get_process_group_ranks(process_group)
        self.rank, self.size = dist.get_rank(process_group), len(ranks)
        # Ranks make their groups in one order.
        number = _num_groups[process_group] = _num_groups.get(process_group, 0) + 1
        store = dist.PrefixStore(f"gpuopt/{number}", process_group.get_group_store())
        self._meeting = StoreMeeting(store, self.rank, self.size, timeout_s)
        self._links = _Links(torch, process_group, ranks)
        atexit.register(_leave, self._meeting, dist if must_destroy else None, os.getpid())
        what = f"the start with gpuopt {__version__}"
        [(self.rank_on_host, self._meeting.has_core)] = self.run(
            lambda communicator: find_neighbours(communicator, what)
        )

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        meeting, links = self._meeting, self._links
        return run_rank(meeting, lambda: function(TorchCommunicator(meeting, links)))


class TorchCommunicator(HostCommunicator):
    """A rank that is a process of a torch.distributed job; see `TorchGroup.run`.

    Sums are made in rank order, on the host: each rank adds up its share of the elements, and sends
    it to all. Arrays on GPUs are sent from page-locked memory. Small arrays go through the store,
    in the message by which the ranks compare their calls.
    """

    def __init__(self, meeting: StoreMeeting, links: _Links) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self._meeting = meeting
        self._links = links

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        data = np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        gathered = self._gather([data], what)
        return [
            value if rank == self.rank else pickle.loads(data.tobytes())
            for rank, [data] in enumerate(gathered)
        ]

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        device = slices.device
        values, indices = stage(slices.values, device), stage(slices.indices, device)
        details = f"by {name_type(indices.dtype)}"
        blocks = [bytes_of(values), bytes_of(indices)]
        gathered = self._gather(blocks, name_gather(slices, what), details)
        all_values, all_indices = (
            np.concatenate(each).view(array.dtype)
            for each, array in zip(zip(*gathered, strict=True), (values, indices), strict=True)
        )
        return IndexedSlices(
            to_device(all_values.reshape(-1, *values.shape[1:]), device),
            to_device(all_indices, device),
            slices.dense_shape,
        )

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        check_sendable(array.dtype)
        device = device_of(array)
        is_root = self.rank == root
        if not is_root and device.kind == "cpu" and not array.flags.writeable:
            raise ValueError(f"broadcast from {root} would write to a read-only array")
        what = f"broadcast from {root} of {array.dtype}{list(array.shape)}"
        blocks = [bytes_of(stage(array, device))] if is_root else []
        block = self._gather(blocks, what)[root][0]
        if not is_root:
            with backend_for(device).enter():
                array[...] = to_device(block.view(array.dtype).reshape(array.shape), device)
        return array

    def barrier(self, what: str = "barrier") -> None:
        self._meeting.meet(what)

    def _gather(self, blocks: list[Bytes], what: str, details: str = "") -> list[list[Bytes]]:
        """Returns all ranks' blocks of bytes; their numbers and sizes may differ."""
        sizes = tuple([block.nbytes for block in blocks])
        is_small = sum(sizes) <= INLINE_BYTES
        inline = b"".join([block.tobytes() for block in blocks]) if is_small else b""
        headers = self._meeting.meet(what, details, sizes, inline)
        gathered = []
        with self._sending(what):
            for rank, header in enumerate(headers):
                received = blocks
                if sum(header.sizes) <= INLINE_BYTES and rank != self.rank:
                    received = _split(np.frombuffer(header.inline, np.uint8), header.sizes)
                elif sum(header.sizes) > INLINE_BYTES:
                    if rank != self.rank:
                        received = [np.empty(size, np.uint8) for size in header.sizes]
                    for block in received:
                        self._links.broadcast(block, rank)
                gathered.append(received)
        return gathered

    def _reduce(
        self, sizes: Sizes, load: Load, op: ReduceOp, what: str, details: str = ""
    ) -> list[Any]:
        loaded = [load(number) for number in range(len(sizes))]
        arrays, totals = [flat for flat, _ in loaded], [into for _, into in loaded]
        if sum(array.nbytes for array in arrays) <= INLINE_BYTES:
            # Of copies: a total may be on the memory of its array.
            blocks = [bytes_of(array.copy()) for array in arrays]
            gathered = self._gather(blocks, what, details)
            for total, *of_ranks in zip(totals, *gathered, strict=True):
                fold([part.view(total.dtype) for part in of_ranks], op, total, total)
            return totals
        self._meeting.meet(what, details)
        failure: Exception | None = None
        with self._sending(what):
            for array, total in zip(arrays, totals, strict=True):
                bounds = [each * array.size // self.size for each in range(self.size + 1)]
                shares = [total[i:j] for i, j in pairwise(bounds)]
                parts = self._links.exchange_shares(bytes_of(array), shares, self.rank)
                try:
                    fold(list(parts), op, parts[0], shares[self.rank])
                except Exception as error:
                    failure = failure or error
                for rank, share in enumerate(shares):
                    self._links.broadcast(bytes_of(share), rank)
            if failure is not None:
                self._meeting.announce_failure(failure)
            has_failed = self._links.is_true_anywhere(failure is not None)
        if failure is not None:
            self._meeting.fail_by(failure, what)
        if has_failed:
            self._meeting.raise_failure()
        return totals

    @contextmanager
    def _sending(self, what: str) -> Iterator[None]:
        """Breaks the group off if sending fails: other ranks would wait for the bytes."""
        try:
            yield
        except BaseException as error:
            why = f"{what} was not done, and the group's connections are lost: {error!r}"
            with suppress(RuntimeError):  # the store may be gone, too
                self._meeting.announce_failure(error)
            self._meeting.break_off(why)
            if isinstance(error, RuntimeError):  # torch raises no other type
                raise WorkerFailedError(why) from error
            raise


class _Links:
    """Sends bytes from rank to rank; all ranks make the same calls."""

    def __init__(self, torch: Any, group: Any, ranks: Sequence[int]) -> None:
        """Takes over a process group of the backend gloo, and the job's numbers of its ranks."""
        self._torch = torch
        self._group = group
        self._ranks = ranks

    def broadcast(self, block: Bytes, root: int) -> None:
        """Overwrites bytes with those of rank `root`."""
        if block.nbytes:
            self._torch.distributed.broadcast(
                self._tensor(block), self._ranks[root], group=self._group
            )

    def exchange_shares(self, block: Bytes, shares: Sequence[Any], rank: int) -> Any:
        """Sends each rank its share of an array's bytes.

        Args:
            block: The bytes of this rank's array.
            shares: The parts of an array of this form.
            rank: Of this process.

        Returns:
            All ranks' arrays, each without the other ranks' shares: [rank, element].
        """
        sizes = [share.nbytes for share in shares]
        mine = shares[rank]
        received = np.empty(len(sizes) * mine.nbytes, np.uint8)
        self._torch.distributed.all_to_all_single(
            self._tensor(received),
            self._tensor(block),
            [mine.nbytes] * len(sizes),
            sizes,
            group=self._group,
        )
        return received.view(mine.dtype).reshape(len(sizes), mine.size)

    def is_true_anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        flags = self._torch.tensor([flag], dtype=self._torch.uint8)
        distributed = self._torch.distributed
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group=self._group)
        return bool(flags[0])

    def _tensor(self, block: Bytes) -> Any:
        # torch warns of read-only memory, even where it only reads.
        return self._torch.from_numpy(block if block.flags.writeable else block.copy())


def _import_torch() -> Any:
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise ImportError(f"TorchGroup needs torch ({error}): pip install torch") from error
    if not torch.distributed.is_available():
        raise ImportError("TorchGroup needs torch.distributed, which this torch was built without")
    return torch


@contextmanager
def _within(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise DeadlineExceededError(
            f"TorchGroup was not made within {timeout_s:g} s: {error}"
        ) from error


def _start(distributed: Any, timeout: timedelta) -> None:
    """Starts torch.distributed in this process."""
    place = place_in_job()
    if place.size == 1:
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        distributed.init_process_group(
            "gloo", timeout=timeout, rank=place.rank, world_size=place.size
        )


def _leave(meeting: StoreMeeting, distributed: Any, process: int) -> None:
    """Ends this process's part in a group.

    Args:
        meeting: The group's.
        distributed: The module `torch.distributed` if the group has started it.
        process: Its id: a forked child does nothing.
    """
    if os.getpid() != process:
        return
    has_failed = getattr(sys, "last_value", None) is not None
    with suppress(RuntimeError):
        meeting.leave(_GRACE_S if has_failed else meeting.timeout_s)
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def _split(block: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    ends = list(accumulate(sizes))
    return [block[end - size : end] for end, size in zip(ends, sizes, strict=True)]
