"""A chief hears every worker, however busy the others are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import CancelledError, SyncReplicasOptimizer, Variable
from gpuopt.distributed import SingleCommunicator, StopRequest, ThreadGroup
from gpuopt.distributed.chief import Chief
from gpuopt.distributed.chief_messages import Leave, Push, SharedVariables


class Mailboxes(SingleCommunicator):
    """Rank 0's end of a group whose other ranks have sent all of their messages before."""

    def __init__(self, of_ranks: dict[int, list[Any]]) -> None:
        self._boxes = {rank: deque(messages) for rank, messages in of_ranks.items()}
        self.taken: list[int] = []
        self.sent: list[tuple[int, Any]] = []

    def send(self, value: Any, rank: int) -> None:
        self.sent.append((rank, value))

    def receive(self, ranks: Iterable[int], timeout_s: float) -> tuple[int, Any] | None:
        for rank in ranks:
            if self._boxes[rank]:
                self.taken.append(rank)
                return rank, self._boxes[rank].popleft()
            return rank, CancelledError(f"rank {rank} has finished")
        return None


def test_a_worker_that_always_pushes_holds_up_nobody() -> None:
    w = Variable(np.zeros(2, np.float32), name="w")
    step = Variable(0, trainable=False, dtype=np.int64)
    gradients: list[Any] = [(np.ones(2, np.float32), 0)]
    boxes = Mailboxes(
        {
            1: [*(Push(number, number - 1, gradients) for number in range(1, 9)), Leave()],
            2: [Push(1, 0, gradients), Push(2, 1, gradients), Leave()],
        }
    )
    shared = SharedVariables(boxes, step, {}, {}, "a test")
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1, 2)
    coordinator = sync.start(step, token_policy="per_step")
    Chief(boxes, coordinator, shared, {w.dtype}, 10.0, StopRequest()).serve()
    assert boxes.taken[:6] == [1, 2, 1, 2, 1, 2]
    figures = [(figures.accepted, figures.stale) for figures in coordinator.figures()]
    assert figures == [(8, 0), (0, 2)]
    assert w.numpy().tolist() == [-8, -8]
    assert [rank for rank, _ in boxes.sent].count(1) == 1 + 8 + 1


def test_equal_numbers_are_the_same_settings() -> None:
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    equal = [{"timeout_s": 60}, {"timeout_s": 60.0}, {"timeout_s": np.float32(60)}]
    ThreadGroup(3, 20.0).run(
        lambda each: SharedVariables(each, step, equal[each.rank], {}, "a test")
    )
    other = [{"timeout_s": 60}, {"timeout_s": 60.5}, {"timeout_s": np.float64("inf")}]
    with pytest.raises(
        ValueError, match=r"timeout_s: 60 on rank 0; 60\.5 on rank 1; inf on rank 2"
    ):
        ThreadGroup(3, 20.0).run(
            lambda each: SharedVariables(each, step, other[each.rank], {}, "a test")
        )
