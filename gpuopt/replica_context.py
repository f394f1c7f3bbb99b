"""Which replica this thread is, of how many: what the core asks and a distributed strategy sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ReplicaContext:
    """One of several replicas that compute parts of one loss.

    Attributes:
        replica_id: From 0 to `num_replicas - 1`.
        num_replicas: How many there are.
        loss_reduction: How their losses are combined. With "mean", each replica scales its own by
            `1 / num_replicas`, so that gradients may be summed.
    """

    replica_id: int = 0
    num_replicas: int = 1
    loss_reduction: Literal["mean", "sum"] = "mean"

    @property
    def loss_scale(self) -> float:
        """What a replica's loss is multiplied by before it is differentiated."""
        return 1.0 / self.num_replicas if self.loss_reduction == "mean" else 1.0


class _ThisThread(threading.local):
    context = ReplicaContext()


_this_thread = _ThisThread()


def replica_context() -> ReplicaContext:
    """Returns this thread's place among the replicas; by default the only one."""
    return _this_thread.context


@contextmanager
def in_replica(context: ReplicaContext) -> Iterator[None]:
    """Makes this thread the given replica."""
    outer, _this_thread.context = _this_thread.context, context
    try:
        yield
    finally:
        _this_thread.context = outer
