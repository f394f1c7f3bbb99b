"""SingleGroup and SingleCommunicator: a group of one rank, which never waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuopt.backends import backend_for
from gpuopt.distributed.communicator import (
    Communicator,
    RankGroup,
    ReduceOp,
    check_op,
    check_root,
)
from gpuopt.variables.indexed_slices import IndexedSlices


class SingleGroup(RankGroup):
    """This process alone, as one rank, whatever other processes a launcher has started.

    With `MirroredStrategy([device], group=SingleGroup())`, each process trains a model of its own,
    as in a search for hyperparameters.
    """

    size = local_size = 1

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        return [function(SingleCommunicator())]


class SingleCommunicator(Communicator):
    """The only rank of its group."""

    rank = 0
    size = 1

    @property
    def local(self) -> SingleCommunicator:
        return self

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        check_op(op)
        return array.copy()

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        return [value]

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        with backend_for(slices.device).enter():
            values, indices = slices.values.copy(), slices.indices.copy()
        return IndexedSlices(values, indices, slices.dense_shape)

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        return array

    def barrier(self, what: str = "barrier") -> None:
        pass
