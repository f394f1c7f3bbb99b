"""Arrays that are sent from host memory: copies of them there, and their buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends import backend_for, to_device
from gpuopt.device import Device, device_of
from gpuopt.distributed.communicator import (
    count_padding,
    fill_buckets,
    name_type,
    split_aligned,
)


class BatchPlan(NamedTuple):
    """How arrays are reduced together.

    Attributes:
        buckets: The positions of the arrays of each bucket.
        sizes: The dtype and the number of elements of each bucket.
        described: All dtypes and shapes.
    """

    buckets: list[list[int]]
    sizes: tuple[tuple[np.dtype[Any], int], ...]
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
def plan_batch(
    dtypes: tuple[np.dtype[Any], ...], shapes: tuple[tuple[int, ...], ...], bucket_bytes: int
) -> BatchPlan:
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
    return BatchPlan(buckets, tuple(sizes), described)


def name_call(plan: BatchPlan, op: str, bucket_bytes: int, what: str | None) -> tuple[str, str]:
    """Returns the name of a call of `batch_all_reduce`, and its details, which ranks compare.

    Args:
        plan: The call's.
        op: Likewise.
        bucket_bytes: Likewise.
        what: A name to use instead of the default.
    """
    details = f"in buckets of {bucket_bytes} bytes"
    if what is None:
        return f"batch_all_reduce({op!r}) of [{plan.described}]", details
    return what, f"as [{plan.described}] by {op!r} {details}"


def split_totals(
    arrays: Sequence[Any], buckets: Sequence[Sequence[int]], totals: Sequence[Any]
) -> list[Any]:
    """Returns the sum for each array, on its device.

    Args:
        arrays: The arrays that were reduced.
        buckets: See `BatchPlan`.
        totals: The flat sums of each bucket, in host memory.
    """
    reduced: list[Any] = [None] * len(arrays)
    for positions, total in zip(buckets, totals, strict=True):
        parts = [arrays[position] for position in positions]
        total = to_device(total, device_of(parts[0]))
        for position, part in zip(positions, split_aligned(total, parts), strict=True):
            reduced[position] = part
    return reduced


def stage(array: Any, device: Device) -> Any:
    """Returns an array's values in host memory; see `Backend.stage`."""
    check_sendable(array.dtype)
    return backend_for(device).stage(array)


def check_sendable(dtype: np.dtype[Any]) -> None:
    """Raises TypeError if bytes of an array would be addresses."""
    if dtype.hasobject:
        raise TypeError(f"an array of {dtype} holds Python objects, which all_gather sends")
