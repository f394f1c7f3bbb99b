"""The protocol by which ranks train together: threads, processes or machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.device import device_of
from gpuopt.variables.indexed_slices import IndexedSlices

ReduceOp = Literal["sum", "min", "max"]

# Small enough to stay in cache on its way through the reduction, large enough that the fixed cost
# of a collective does not count.
BUCKET_BYTES = 4 * 2**20

# Where arrays that are sent together begin: at a GPU's cache lines, so that updates can read each
# of them 16 bytes at a time.
_ALIGNMENT = 128


class Communicator(Protocol):
    """One rank's end of a group.

    All ranks call the same methods in the same order, with arrays of the same shapes and dtypes,
    each on its own device. Every rank gets the same bits.

    Arrays are only read, but for `broadcast`, and may have any strides. Ranks may write to the
    arrays that a method returns. On a GPU, a method's work is in order with the caller's current
    stream: it comes after earlier work on that stream, and before later work, on all ranks.

    Attributes:
        rank: From 0 to `size - 1`.
        size: How many ranks there are.

    Every method raises ValueError on all ranks if their calls do not match,
    DeadlineExceededError if a rank does not come in time, WorkerFailedError if a rank has failed,
    and CancelledError if a rank has finished or the group was closed. The message names the call
    and the rank.
    """

    rank: int
    size: int

    @property
    def local(self) -> Communicator:
        """The group of those ranks that run in this process, in the same order.

        `local.rank` is this rank's place among them. Its `all_gather` copies nothing.
        """
        raise NotImplementedError

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        """Returns the elementwise sum, least or greatest of all ranks' arrays.

        They are added up in rank order, but by NCCL in another one; NaN is not left out.
        """
        raise NotImplementedError

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        """Returns all ranks' values, in rank order.

        Args:
            value: Any object, not the same kind on every rank. Ranks of this process get the
                object itself; ranks of other processes get a copy, made by pickle. Arrays on GPUs
                that are in it are not waited for.
            what: What is gathered, for error messages; the same on every rank.
        """
        raise NotImplementedError

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        """Returns all ranks' rows, one rank after the other; their numbers may differ.

        Args:
            slices: On this rank's device.
            what: Describes the call, beside the rows' shape and dtypes; the same on all ranks.
        """
        raise NotImplementedError

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Overwrites the array with that of rank `root`, and returns it."""
        raise NotImplementedError

    def barrier(self, what: str = "barrier") -> None:
        """Returns when all ranks have called it.

        Args:
            what: The barrier's name. ValueError is raised on ranks whose names differ.
        """
        raise NotImplementedError

    def batch_all_reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp = "sum",
        bucket_bytes: int = BUCKET_BYTES,
        what: str | None = None,
    ) -> list[Any]:
        """Reduces many arrays in few messages.

        Args:
            arrays: Any number of arrays on this rank's device, of any shapes and dtypes.
            op: See `all_reduce`.
            bucket_bytes: Arrays of one dtype are sent together up to this size, padded to 128
                bytes each; a larger array is sent alone.
            what: Describes the call, and must be the same on all ranks, which is checked first; by
                default the arrays' shapes and dtypes.

        Returns:
            The reduced arrays in the given order; they may be views of a common buffer.
        """
        if what is None:
            forms = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
            what = f"batch_all_reduce({op!r}) of [{forms}]"
        buckets = fill_buckets(arrays, bucket_bytes)
        self.barrier(what)
        reduced: list[Any] = [None] * len(arrays)
        for positions in buckets:
            if len(positions) == 1:
                reduced[positions[0]] = self.all_reduce(arrays[positions[0]], op)
                continue
            parts = [arrays[i] for i in positions]
            total = self.all_reduce(join_aligned(parts), op)
            for i, part in zip(positions, split_aligned(total, parts), strict=True):
                reduced[i] = part
        return reduced


@runtime_checkable
class MessagingCommunicator(Communicator, Protocol):
    """A communicator of processes that also sends messages from one rank to another.

    They are for ranks that do different things. While a rank receives messages, those that it
    receives from make no other call of the communicator.
    """

    def send(self, value: Any, rank: int) -> None:
        """Sends an object to another rank, and never waits; the object may change afterwards.

        Args:
            value: Any object, which is sent by pickle. Arrays on GPUs that are in it are not waited
                for.
            rank: Who is to receive it.
        """
        raise NotImplementedError

    def receive(self, ranks: Iterable[int], timeout_s: float) -> tuple[int, Any] | None:
        """Waits for a message of one of several ranks.

        Args:
            ranks: Whose messages count; of two that are there, the first one's is returned.
            timeout_s: How long to wait, in seconds.

        Returns:
            (rank, object), or None if no message has come in time. In place of an object, a rank
            that has failed or finished gives the WorkerFailedError or CancelledError that says so,
            each time it is asked.

        Raises:
            ValueError: a rank makes another call.
        """
        raise NotImplementedError


class RankGroup(Protocol):
    """The ranks that train together, of which some or all run in this process.

    Attributes:
        size: How many ranks there are.
        local_size: How many of them run in this process.
    """

    size: int
    local_size: int

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """Calls `function` once for each rank of this process, with the rank's communicator.

        Nobody waits for a rank whose function has ended. The other ranks' calls raise
        WorkerFailedError if it raised, and CancelledError if it returned. How long the function
        itself takes is not limited.

        Returns:
            What the ranks of this process returned, in rank order.

        Raises:
            Exception: what one of these ranks raised. An error that only reports another rank, as
                failed, finished or missing, is raised only if there is no other.
        """
        raise NotImplementedError


def check_op(op: str) -> None:
    """Raises ValueError if there is no such reduction."""
    if op not in ("sum", "min", "max"):
        raise ValueError(f'op must be "sum", "min" or "max", got {op!r}')


def reduction_of(xp: Any, op: ReduceOp) -> Any:
    """Returns the ufunc of an array module that reduces two arrays."""
    return {"sum": xp.add, "min": xp.minimum, "max": xp.maximum}[op]


def check_root(root: int, size: int) -> None:
    """Raises ValueError if there is no such rank."""
    if not 0 <= root < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root}")


def join_aligned(arrays: Sequence[Any]) -> Any:
    """Returns a flat array of the values of arrays of one dtype, aligned to whole cache lines."""
    dtype = arrays[0].dtype
    backend = backend_for(device_of(arrays[0]))
    with backend.enter():
        parts = [array.reshape(-1) for array in arrays]
        gaps = [count_padding(part.size, dtype) for part in parts]
        if any(gaps):
            padding = backend.xp.zeros(max(gaps), dtype)
            parts = [
                each
                for part, gap in zip(parts, gaps, strict=True)
                for each in ((part, padding[:gap]) if gap else (part,))
            ]
        return backend.xp.concatenate(parts)


def split_aligned(joined: Any, arrays: Sequence[Any]) -> list[Any]:
    """Returns views of the parts of an array, in the shapes of those that `join_aligned` joined."""
    parts, start = [], 0
    for array in arrays:
        end = start + array.size
        part = joined[start:end]
        parts.append(part if array.ndim == 1 else part.reshape(array.shape))
        start = end + count_padding(array.size, joined.dtype)
    return parts


def say_error(error: BaseException, write: Callable[[object], str] = repr) -> str:
    """Returns an error's text, by `repr` or `str`, also if it cannot be written or encoded.

    Its `__repr__` may raise, and a file's name in it may not be Unicode.
    """
    try:
        text = write(error)
    except Exception as failure:
        text = f"<{write.__name__}() of {type(error).__name__} raised {type(failure).__name__}>"
    return text.encode(errors="backslashreplace").decode()


def count_padding(size: int, dtype: Any) -> int:
    """Returns how many elements `join_aligned` puts behind an array of `size` elements."""
    return -size % (_ALIGNMENT // dtype.itemsize)  # type: ignore[no-any-return]


class Refusal(NamedTuple):
    """The parts of an error that several workers or ranks raise, of which each makes its own.

    An error that was raised refers to the frames it came through, and so to all of their variables.
    """

    kind: type[Exception]
    message: str
    cause: BaseException | None = None

    def raise_error(self) -> NoReturn:
        raise self.kind(self.message) from self.cause


def say_who(brought: Sequence[str]) -> str:
    """Describes things that differ, which ranks bring, each with its ranks."""
    of_thing: dict[str, list[str]] = {}
    for rank, thing in enumerate(brought):
        of_thing.setdefault(thing, []).append(str(rank))
    return "; ".join(f"{thing} on rank {', '.join(ranks)}" for thing, ranks in of_thing.items())


def name_gather(slices: IndexedSlices, what: str | None) -> str:
    """Describes a call of `all_gather_slices`, with what the caller says of it."""
    name = f"all_gather_slices of {name_type(slices.dtype)}[:, {list(slices.values.shape[1:])}]"
    return name if what is None else f"{what} by {name}"


@cache
def name_type(dtype: np.dtype[Any]) -> str:
    """Returns a dtype's name: numpy writes it anew each time, in as long as a message takes."""
    return str(dtype)


def fill_buckets(arrays: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """Groups positions of arrays of one dtype, in their order, by their `dtype` and `nbytes`."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for position, array in enumerate(arrays):
        bucket, size = open_buckets.get(array.dtype, ([], 0))
        padded = array.nbytes + -array.nbytes % _ALIGNMENT
        if not bucket or size + padded > bucket_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_buckets[array.dtype] = bucket, size + padded
    return buckets
