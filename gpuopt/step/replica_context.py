"""The replica that this thread is: set by a distributed strategy, and read by every optimizer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gpuopt.step.request import StepRequest


class Strategy(Protocol):
    """How several replicas update their variables together."""

    def apply_gradients(self, optimizer: Any, request: StepRequest) -> None:
        """Does one replica's part of `optimizer.apply_gradients`, called in its context."""


@dataclass(frozen=True)
class ReplicaContext:
    """One of several replicas that compute parts of one loss.

    Attributes:
        replica_id: From 0 to `num_replicas - 1`.
        num_replicas: How many there are.
        loss_reduction: How the replicas' losses are combined. With "mean", each replica scales its
            loss by `1 / num_replicas`, so that gradients may be summed.
        strategy: The strategy that does the update for `Optimizer.apply_gradients`, if any.
        is_cross_replica: Whether this is not a replica, but TensorFlow's cross-replica context, in
            which code handles all replicas at once.
    """

    replica_id: int = 0
    num_replicas: int = 1
    loss_reduction: Literal["mean", "sum"] = "mean"
    strategy: Strategy | None = None
    is_cross_replica: bool = False

    @property
    def loss_scale(self) -> float:
        """What a replica's loss is multiplied by before it is differentiated."""
        return 1.0 / self.num_replicas if self.loss_reduction == "mean" else 1.0


class _ThisThread(threading.local):
    context = ReplicaContext()


# Public, because each step reads it: a function call would cost time.
this_thread = _ThisThread()


def replica_context() -> ReplicaContext:
    """Returns this thread's place among the replicas; by default the only one."""
    return this_thread.context


@contextmanager
def in_replica(context: ReplicaContext) -> Iterator[None]:
    """Makes this thread the given replica."""
    outer, this_thread.context = this_thread.context, context
    try:
        yield
    finally:
        this_thread.context = outer
