"""Reduction over ranks: each rank reduces its share of the elements, and sends the result to all.

Each rank sends and receives 2 (n - 1) / n of the bytes, the least that is possible (Patarasuk and
Yuan 2009, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gpuopt.distributed.communicator import ReduceOp, reduction_of
from gpuopt.distributed.communicators.exchange import Call, Exchange
from gpuopt.distributed.communicators.headers import INLINE_BYTES, Announced, Bytes, Parcel
from gpuopt.distributed.communicators.host_communicator import Load, Sizes
from gpuopt.distributed.communicators.mail import Transfer

# A bucket is packed, and another one added up, while a third is on its way.
_BUCKETS_AHEAD = 2


def reduce_in_shares(
    exchange: Exchange,
    buckets: Sizes,
    load: Load,
    op: ReduceOp,
    what: str,
    details: str = "",
) -> list[Any]:
    """Does what `HostCommunicator._reduce` does, over this rank's exchange."""
    if sum(dtype.itemsize * size for dtype, size in buckets) <= INLINE_BYTES:
        loaded = [load(number) for number in range(len(buckets))]
        inline = b"".join([flat.tobytes() for flat, _ in loaded])
        headers = exchange.exchange(what, [Parcel(inline)] * exchange.size, details=details)
        start = 0
        for (dtype, size), (_, into) in zip(buckets, loaded, strict=True):
            parts = [np.frombuffer(header.inline, dtype, size, start) for header in headers]
            fold(parts, op, into, into)
            start += dtype.itemsize * size
        return [into for _, into in loaded]
    plan = _plan_shares(buckets, exchange.size, exchange.rank)
    shared = [
        _SharedBucket(exchange, dtype, shares)
        for (dtype, _), shares in zip(buckets, plan.shares, strict=True)
    ]
    with exchange.call(what, plan.announced, details) as call:
        for number, bucket in enumerate(shared[:_BUCKETS_AHEAD]):
            bucket.send(call, *load(number))
        call.meet()
        for bucket in shared[:_BUCKETS_AHEAD]:
            bucket.receive(call)
        for number, bucket in enumerate(shared):
            bucket.reduce(call, op)
            if (ahead := number + _BUCKETS_AHEAD) < len(shared):
                shared[ahead].send(call, *load(ahead))
                shared[ahead].receive(call)
    return [bucket.into for bucket in shared]


class _SharesPlan(NamedTuple):
    """What each rank reduces, and what this one sends.

    Attributes:
        shares: For each bucket, each rank's share, in bytes.
        announced: What is sent to each rank.
    """

    shares: list[list[slice]]
    announced: list[Announced]


@lru_cache(maxsize=64)
def _plan_shares(buckets: Sizes, num_ranks: int, rank: int) -> _SharesPlan:
    """Makes the plan for buckets of given dtypes and sizes: the same ones come in each step."""
    shares = []
    for dtype, size in buckets:
        bounds = [dtype.itemsize * (each * size // num_ranks) for each in range(num_ranks + 1)]
        shares.append(list(map(slice, bounds[:-1], bounds[1:])))
    lengths = [[share.stop - share.start for share in of_bucket] for of_bucket in shares]
    announced = [
        Announced(
            tuple(
                lengths[number][rank if is_result else other]
                for number, is_result in _order(len(buckets))
            )
        )
        for other in range(num_ranks)
    ]
    return _SharesPlan(shares, announced)


def _order(num_buckets: int) -> Iterator[tuple[int, bool]]:
    """Yields the blocks that a rank sends: a bucket's number, and whether it is the result."""
    yield from ((number, False) for number in range(min(_BUCKETS_AHEAD, num_buckets)))
    for number in range(num_buckets):
        yield number, True
        if (ahead := number + _BUCKETS_AHEAD) < num_buckets:
            yield ahead, False


class _SharedBucket:
    """An array that the ranks reduce, each its share of the elements.

    Attributes:
        into: Where the result goes, once the array is sent.
    """

    into: Any

    def __init__(self, exchange: Exchange, dtype: np.dtype[Any], shares: list[slice]) -> None:
        self._exchange = exchange
        self._dtype = dtype
        self._shares = shares
        self._mine = shares[exchange.rank]

    def send(self, call: Call, flat: Any, into: Any) -> None:
        """Begins to send each other rank its share of this rank's array."""
        self._bytes, self.into = flat.view(np.uint8), into
        for rank in self._exchange.mail.others:
            call.send(rank, self._bytes[self._shares[rank]])

    def receive(self, call: Call) -> None:
        """Begins to receive this rank's share of the other ranks' arrays."""
        self._parts = [self._bytes[self._mine]] * self._exchange.size
        self._coming: list[Transfer] = []
        for rank in self._exchange.mail.others:
            self._parts[rank] = np.empty(self._mine.stop - self._mine.start, np.uint8)
            self._coming += call.receive(rank, self._parts[rank])

    def reduce(self, call: Call, op: ReduceOp) -> None:
        """Reduces this rank's share, and begins to send it, and to receive the others' ones."""
        call.wait(self._coming)
        result = self.into.view(np.uint8)
        total = result[self._mine].view(self._dtype)
        parts = [part.view(self._dtype) for part in self._parts]
        # The result may overwrite this rank's part, which is not the first to be added.
        fold(parts, op, parts[0] if self._exchange.rank > 0 else total, total)
        for rank in self._exchange.mail.others:
            call.send(rank, result[self._mine])
            call.receive(rank, result[self._shares[rank]])


def bytes_of(array: Any) -> Bytes:
    """Returns the memory of a C-contiguous array."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def fold(parts: Sequence[Any], op: ReduceOp, subtotal: Any, total: Any) -> None:
    """Reduces arrays in their order.

    `subtotal` is memory for all results but the last one, and may be `parts[0]` or `total`.
    """
    if len(parts) == 1:
        total[...] = parts[0]
    result, combine = parts[0], reduction_of(np, op)
    for place, part in enumerate(parts[1:], 2):
        target = total if place == len(parts) else subtotal
        result = combine(result, part, out=target)
