"""Sums of accumulated gradients over the replicas of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpuopt.distributed.first_rank import call_in_first_rank
from gpuopt.distributed.strategy import MirroredStrategy
from gpuopt.optimizer import Optimizer
from gpuopt.step.replica_context import replica_context
from gpuopt.step.updates import Pair
from gpuopt.variables.indexed_slices import IndexedSlices
from gpuopt.variables.variable import Variable

# Sums as pairs of an update; and the variables that hold the dense ones.
Sums = tuple[list[tuple[Any, Variable]], list[Variable]]


def strategy_of_replica(optimizer: Optimizer) -> MirroredStrategy | None:
    """Returns the strategy whose replica this thread is, if any.

    Raises:
        RuntimeError: the thread runs a tower, or handles all replicas at once.
    """
    context = replica_context()
    if context.strategy is None and context.num_replicas == 1:
        return None
    kind = type(optimizer).__name__
    if not isinstance(context.strategy, MirroredStrategy):
        raise RuntimeError(
            f'"{optimizer.get_name()}" cannot be used in a tower: write '
            f"TowerOptimizer({kind}(...)), which accumulates what the towers bring together"
        )
    if context.is_cross_replica:
        raise RuntimeError(
            f'"{optimizer.get_name()}" cannot be used in a cross-replica context: call '
            f"{kind}.apply_gradients in MirroredStrategy.run, or outside of it"
        )
    return context.strategy


class ReplicaCall:
    """One replica's end of a call that all replicas make; the first of a process does the work.

    Attributes:
        pairs: This replica's own gradients and copies, checked, without those that are None.
        is_first: Whether this is the first replica of its process.
    """

    def __init__(
        self, strategy: MirroredStrategy, optimizer: Optimizer, given: Sequence[Any] | None
    ) -> None:
        """Checks gradients.

        Args:
            strategy: Of this replica.
            optimizer: Whose call it is.
            given: (gradient, variable) pairs of the replica; None if the call takes none.

        Raises:
            ValueError, TypeError, IndexError: what `Optimizer.apply_gradients` raises for a pair.
        """
        gradients: Sequence[Any] = ()
        self._mirrored: Sequence[Any] = ()
        self._what = f'a call of "{optimizer.get_name()}" without gradients'
        if given is not None:
            gradients, self._mirrored, described = strategy.own_gradients(optimizer, given)
            self._what = f'gradients for "{optimizer.get_name()}" to accumulate, {described}'
        self._strategy = strategy
        self._communicator = strategy.communicator
        place = self._communicator.local.rank
        self.is_first = place == 0
        copies = [each.replicas[place] for each in self._mirrored]
        self.pairs: list[Pair] = list(zip(gradients, copies, strict=True))
        self._sums: list[Sums] = []

    @property
    def is_spread(self) -> bool:
        """Whether there are replicas in other processes."""
        return self._communicator.local.size < self._communicator.size

    def first_found(self, found: Any) -> Any:
        """Returns what the first of all replicas has found whose own is not None."""
        of_ranks = self._communicator.all_gather(found, self._what)
        return next((each for each in of_ranks if each is not None), None)

    def wait_for_others(self) -> None:
        """Waits until the replicas of this process have come.

        Raises:
            ValueError: they bring gradients of other variables.
        """
        self._communicator.local.barrier(self._what)

    def in_first(self, work: Callable[[list[Pair]], Sums | None]) -> Sums | None:
        """Has the first replica of the process do something for all; the others wait.

        Args:
            work: Called by the first replica with the pairs of all; returns sums of all copies.

        Returns:
            Those of this replica's copies.
        """
        brought = self.pairs, self._sums

        def work_for_all(of_replicas: list[tuple[list[Pair], list[Sums]]]) -> None:
            # The copies of one variable are side by side, as in an update.
            by_variable = zip(*(pairs for pairs, _ in of_replicas), strict=True)
            sums = work([pair for pairs in by_variable for pair in pairs])
            if sums is None:
                return
            for own, (_, kept) in zip(self._by_replica(*sums), of_replicas, strict=True):
                kept.append(own)

        local, devices = self._communicator.local, self._strategy.devices
        call_in_first_rank(local, work_for_all, brought, devices, self._what)
        return self._sums[0] if self._sums else None

    def _by_replica(self, pairs: Sequence[Pair], totals: Sequence[Variable]) -> list[Sums]:
        """Returns each replica's part of the sums of all copies."""
        of_replicas: list[Sums] = [([], []) for _ in self._strategy.devices]
        unseen = iter(totals)  # of the dense ones, in their order
        for gradient, variable in pairs:
            own_pairs, own_totals = of_replicas[self._strategy.place_of(variable)]
            own_pairs.append((gradient, variable))
            if not isinstance(gradient, IndexedSlices):
                own_totals.append(next(unseen))
        return of_replicas
