"""Ranks with a GPU each, for tests that have arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuopt import IndexedSlices
from gpuopt.distributed import Communicator, NCCLGroup, RankGroup


class GpuRank(Communicator):
    """A rank that brings arrays to its GPU, where its communicator works on them, and back."""

    def __init__(self, communicator: Communicator, device: int) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._device = device

    @property
    def local(self) -> Communicator:
        return self._communicator.local

    def all_reduce(self, array: Any, op: Any = "sum") -> Any:
        return self._call(lambda there: self._communicator.all_reduce(there, op), array)

    def batch_all_reduce(self, arrays: Sequence[Any], *options: Any, **named: Any) -> list[Any]:
        import cupy

        with cupy.cuda.Device(self._device):
            there = [to_gpu(array) for array in arrays]
            reduced = self._communicator.batch_all_reduce(there, *options, **named)
            return [self._to_host(array) for array in reduced]

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        return self._communicator.all_gather(value, what)

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        import cupy

        with cupy.cuda.Device(self._device):
            there = IndexedSlices(to_gpu(slices.values), to_gpu(slices.indices), slices.dense_shape)
            gathered = self._communicator.all_gather_slices(there, what)
            return IndexedSlices(
                self._to_host(gathered.values),
                self._to_host(gathered.indices),
                gathered.dense_shape,
            )

    def broadcast(self, array: Any, root: int = 0) -> Any:
        def broadcast(there: Any) -> Any:
            assert self._communicator.broadcast(there, root) is there
            return there

        array[...] = self._call(broadcast, array)
        return array

    def barrier(self, what: str = "barrier") -> None:
        self._communicator.barrier(what)

    def _call(self, call: Callable[[Any], Any], array: Any) -> Any:
        import cupy

        with cupy.cuda.Device(self._device):
            return self._to_host(call(to_gpu(array)))

    def _to_host(self, array: Any) -> Any:
        assert array.device.id == self._device
        return array.get()


class GpuRanks(RankGroup):
    """Threads with a GPU each, over NCCL."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = self.local_size = size
        self._group = NCCLGroup([f"gpu:{i}" for i in range(size)], timeout_s=timeout_s)

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        return self._group.run(lambda rank: function(GpuRank(rank, rank.rank)))


def to_gpu(array: Any) -> Any:
    """Copies an array to the current GPU; if it is strided, to one that is strided, too."""
    import cupy

    array = np.asarray(array)
    if array.dtype.hasobject:
        return array
    if not array.ndim or array.flags.c_contiguous or array.flags.f_contiguous:
        return cupy.asarray(array)
    with_gaps = cupy.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    with_gaps[..., ::2] = cupy.asarray(array)
    return with_gaps[..., ::2]
