"""Updates of the copies of mirrored variables, by gradients that are summed over all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from gpuopt.distributed.mirrored import MirroredVariable, PerReplica
from gpuopt.optimizer import Optimizer
from gpuopt.step.replica_context import ReplicaContext, in_replica
from gpuopt.step.request import Copies, StepRequest


def update_copies(
    make: Callable[[StepRequest], None],
    sums: Iterable[tuple[PerReplica, MirroredVariable]],
    request: StepRequest,
) -> None:
    """Updates each copy of this process by the sum of gradients on the copy's device.

    Args:
        make: Makes the step.
        sums: The sums, and whose they are.
        request: The step, but for its pairs.
    """
    sums = list(sums)
    every_copy = [
        (gradient, copy)
        for summed, variable in sums
        for gradient, copy in zip(summed.values, variable.replicas, strict=True)
    ]
    # Outside of all replicas: hyperparameters are evaluated once, and the step grows once.
    num_copies = max((len(variable.replicas) for _, variable in sums), default=1)
    of_variables = {tuple(copy.device for copy in each.replicas) for _, each in sums}
    devices = set(chain.from_iterable(of_variables))
    are_alike = (
        len(of_variables) == 1
        and len(devices) == num_copies
        and all(device.kind == "gpu" for device in devices)
    )
    identities = frozenset(copy.identity for _, copy in every_copy)
    with in_replica(ReplicaContext()):
        copies = Copies(num_copies, are_alike, identities)
        make(request._replace(pairs=every_copy, copies=copies))


class AlreadySummed:
    """The strategy that `Optimizer._distributed_apply` gets for gradients that are summed already.

    Attributes:
        num_replicas_in_sync: See `MirroredStrategy`, also for the methods.
    """

    def __init__(self, num_replicas: int, request: StepRequest) -> None:
        """Takes the step.

        Args:
            num_replicas: See `num_replicas_in_sync`.
            request: The step; its pairs, global step and name are those that `update` is given.
        """
        self.num_replicas_in_sync = num_replicas
        self._request = request

    def batch_reduce_to(
        self, op: str, value_destination_pairs: Iterable[tuple[PerReplica, MirroredVariable]]
    ) -> list[PerReplica]:
        return [value for value, _ in value_destination_pairs]

    def update(
        self,
        optimizer: Optimizer,
        grads_and_vars: Iterable[tuple[PerReplica | None, MirroredVariable]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        pairs = [(value, variable) for value, variable in grads_and_vars if value is not None]
        request = self._request._replace(global_step=global_step, name=name)
        # Not by its `apply_gradients`, which each replica has called, maybe a user's own.
        update_copies(optimizer._apply_request, pairs, request)
