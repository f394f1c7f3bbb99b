"""Communicators of processes that send arrays from host memory, and add them up there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.device import Device, device_of
from gpuopt.distributed.communicator import (
    BUCKET_BYTES,
    Communicator,
    ReduceOp,
    check_op,
    count_padding,
    fill_buckets,
    join_aligned,
    name_type,
    split_aligned,
)
from gpuopt.distributed.communicators.exchange import Exchange
from gpuopt.distributed.communicators.single import SingleCommunicator
from gpuopt.distributed.communicators.store_meeting import StoreMeeting

# Returns a flat array in host memory, given its number, and the array that its result goes to,
# which may be the same memory.
Load: TypeAlias = Callable[[int], tuple[Any, Any]]
# The dtype and the number of elements of each bucket.
Sizes: TypeAlias = "tuple[tuple[np.dtype[Any], int], ...]"

# With less for each rank, messages would cost more than their bytes.
_LEAST_SHARE_BYTES = 2**20


def default_bucket_bytes(num_ranks: int) -> int:
    """Returns the size of buckets that are reduced in shares, in bytes."""
    return max(BUCKET_BYTES, num_ranks * _LEAST_SHARE_BYTES)


class HostCommunicator(Communicator):
    """A rank that is a process, and reduces arrays on the host.

    Those on GPUs are sent from page-locked memory of the host. Buckets are by default so large that
    each rank adds up at least 1 MiB of them.
    """

    @property
    def local(self) -> SingleCommunicator:
        return SingleCommunicator()

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        check_op(op)
        device = device_of(array)
        flat = stage(array, device).reshape(-1)
        what = f"all_reduce({op!r}) of {name_type(array.dtype)}{list(array.shape)}"
        sizes = ((flat.dtype, flat.size),)
        [total] = self._reduce(sizes, lambda number: (flat, np.empty_like(flat)), op, what)
        return to_device(total.reshape(array.shape), device)

    def batch_all_reduce(
        self,
        arrays: Sequence[Any],
        op: ReduceOp = "sum",
        bucket_bytes: int | None = None,
        what: str | None = None,
    ) -> list[Any]:
        check_op(op)
        if bucket_bytes is None:
            bucket_bytes = default_bucket_bytes(self.size)
        dtypes, shapes = [array.dtype for array in arrays], [array.shape for array in arrays]
        plan = _plan_batch(tuple(dtypes), tuple(shapes), bucket_bytes)
        details = f"in buckets of {bucket_bytes} bytes"
        if what is None:
            what = f"batch_all_reduce({op!r}) of [{plan.described}]"
        else:
            details = f"as [{plan.described}] by {op!r} {details}"

        def load(number: int) -> tuple[Any, Any]:
            parts = [arrays[position] for position in plan.buckets[number]]
            device = device_of(parts[0])
            joined = parts[0] if len(parts) == 1 else join_aligned(parts)
            flat = stage(joined, device).reshape(-1)
            # What was joined is nobody else's, and neither is what was copied from a GPU.
            is_own = len(parts) > 1 or device.kind == "gpu"
            return flat, flat if is_own else np.empty_like(flat)

        totals = self._reduce(plan.sizes, load, op, what, details)
        reduced: list[Any] = [None] * len(arrays)
        for positions, total in zip(plan.buckets, totals, strict=True):
            given = [arrays[position] for position in positions]
            total = to_device(total, device_of(given[0]))
            for position, part in zip(positions, split_aligned(total, given), strict=True):
                reduced[position] = part
        return reduced

    def _reduce(
        self, sizes: Sizes, load: Load, op: ReduceOp, what: str, details: str = ""
    ) -> list[Any]:
        """Reduces flat arrays in host memory, in rank order, to the same bits on every rank.

        Each is loaded once. Like `what`, `details` must be the same on all ranks.
        """
        raise NotImplementedError


def run_rank(meeting: Exchange | StoreMeeting, call: Callable[[], Any]) -> list[Any]:
    """Makes a run of the only rank of this process by `call`; see `RankGroup.run`."""
    meeting.check_no_run()
    try:
        meeting.begin_run()
        result = call()
    except BaseException as error:
        meeting.end_run(error)
        raise
    else:
        meeting.end_run(None)
        return [result]
    finally:
        # The first operation of the block: Ctrl-C cannot come before it.
        meeting.is_running = False


class _BatchPlan(NamedTuple):
    """How arrays are reduced together.

    Attributes:
        buckets: The positions of the arrays of each bucket.
        sizes: The dtype and the number of elements of each bucket.
        described: All dtypes and shapes.
    """

    buckets: list[list[int]]
    sizes: Sizes
    described: str


class _Form(NamedTuple):
    """The dtype and the shape of an array."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


@lru_cache(maxsize=64)
def _plan_batch(
    dtypes: tuple[np.dtype[Any], ...], shapes: tuple[tuple[int, ...], ...], bucket_bytes: int
) -> _BatchPlan:
    """Returns the plan for arrays of these dtypes and shapes; cached, as each step has the same."""
    for dtype in dtypes:
        check_sendable(dtype)
    forms = [_Form(*form) for form in zip(dtypes, shapes, strict=True)]
    buckets = fill_buckets(forms, bucket_bytes)
    sizes = []
    for positions in buckets:
        dtype, of_bucket = dtypes[positions[0]], [forms[position].size for position in positions]
        if len(of_bucket) > 1:
            of_bucket = [size + count_padding(size, dtype) for size in of_bucket]
        sizes.append((dtype, sum(of_bucket)))
    described = ", ".join([f"{name_type(dtype)}{list(shape)}" for dtype, shape in forms])
    return _BatchPlan(buckets, tuple(sizes), described)


def stage(array: Any, device: Device) -> Any:
    """Returns an array's values in host memory; see `Backend.stage`."""
    check_sendable(array.dtype)
    return backend_for(device).stage(array)


def check_sendable(dtype: np.dtype[Any]) -> None:
    """Raises TypeError if bytes of an array would be addresses."""
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} holds Python objects, which all_gather sends")
