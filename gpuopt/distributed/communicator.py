"""What data-parallel training asks of whatever joins its ranks: threads, processes or machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from gpuopt.backends import backend_for
from gpuopt.device import device_of
from gpuopt.indexed_slices import IndexedSlices

ReduceOp = Literal["sum", "min", "max"]

# Small enough to stay in cache on its way through the reduction, large enough that the fixed cost
# of a collective does not count.
BUCKET_BYTES = 4 * 2**20


class Communicator(Protocol):
    """One rank's end of a group.

    All ranks call the same methods in the same order, with arrays of the same shapes and dtypes,
    each on its own device. Every rank gets the same bits.

    Attributes:
        rank: From 0 to `size - 1`.
        size: How many ranks there are.

    Every method raises ValueError on all ranks if their calls do not match,
    DeadlineExceededError if a rank does not come in time, WorkerFailedError if a rank has failed,
    and CancelledError if the group was closed.
    """

    rank: int
    size: int

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        """Returns the elementwise sum, least or greatest of all ranks' arrays, in rank order."""
        raise NotImplementedError

    def all_gather_slices(self, slices: IndexedSlices) -> IndexedSlices:
        """Returns all ranks' rows, one rank after the other; their numbers may differ."""
        raise NotImplementedError

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Overwrites the array with that of rank `root`, and returns it."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Returns when all ranks have come."""
        raise NotImplementedError

    def batch_all_reduce(
        self, arrays: Sequence[Any], op: ReduceOp = "sum", bucket_bytes: int = BUCKET_BYTES
    ) -> list[Any]:
        """Reduces many arrays in few messages.

        Args:
            arrays: Of any shapes and dtypes, all on this rank's device.
            op: See `all_reduce`.
            bucket_bytes: Arrays of one dtype go together up to this size; a larger one goes alone.

        Returns:
            The reduced arrays in the given order; they may be views of a common buffer.
        """
        reduced: list[Any] = [None] * len(arrays)
        for positions in _buckets(arrays, bucket_bytes):
            if len(positions) == 1:
                reduced[positions[0]] = self.all_reduce(arrays[positions[0]], op)
                continue
            backend = backend_for(device_of(arrays[positions[0]]))
            with backend.active():
                joined = backend.xp.concatenate([arrays[i].reshape(-1) for i in positions])
            flat = self.all_reduce(joined, op)
            start = 0
            for i in positions:
                end = start + arrays[i].size
                reduced[i] = flat[start:end].reshape(arrays[i].shape)
                start = end
        return reduced


def _buckets(arrays: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """Groups positions of arrays of one dtype, in their order."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for position, array in enumerate(arrays):
        bucket, size = open_buckets.get(array.dtype, ([], 0))
        if not bucket or size + array.nbytes > bucket_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(position)
        open_buckets[array.dtype] = bucket, size + array.nbytes
    return buckets
