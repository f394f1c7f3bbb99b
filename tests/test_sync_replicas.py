"""Sync replicas do what TensorFlow's do, equal a sequential replay bit by bit, and never hang."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_cases import check, read_json

import gpuopt
from gpuopt import (
    CancelledError,
    DeadlineExceededError,
    IndexedSlices,
    SyncReplicasOptimizer,
    Variable,
    WorkerFailedError,
)
from gpuopt.distributed import Coordinator, SyncReplicasWorker

FLOAT32_TOLERANCE = 3e-6
SHORT_S = 0.3
LONG_S = 20.0
# How much later than its deadline a wait may end, on a machine that is busy with other things.
SLACK_S = 2.0


class Call:
    """A call in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            function()
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - started
        self.is_done = True

    def join(self) -> Call:
        self._thread.join(LONG_S)
        assert self.is_done, "the call hangs"
        return self


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.0005)


def new_step() -> Variable:
    return Variable(0, name="global_step", trainable=False, dtype=np.int64)


class Training:
    """A coordinator over one variable `w`, whose workers push what they are told to."""

    def __init__(
        self,
        aggregate: int,
        total: int,
        *,
        optimizer: gpuopt.Optimizer | None = None,
        timeout_s: float = LONG_S,
        **start: Any,
    ) -> None:
        self.w = Variable(np.zeros(2, np.float32), name="w")
        self.step = new_step()
        self.sync = SyncReplicasOptimizer(
            optimizer or gpuopt.GradientDescentOptimizer(1.0), aggregate, total
        )
        self.coordinator = self.sync.start(self.step, timeout_s=timeout_s, **start)
        self.workers = [self.sync.worker(index) for index in range(total)]

    def push(self, worker: int, gradient: float = 1.0) -> None:
        self.workers[worker].apply_gradients(
            [(np.full(2, gradient, np.float32), self.w)], self.step
        )

    def in_thread(self, worker: int, gradient: float = 1.0) -> Call:
        """Starts a push, and returns once it waits or is over."""
        waiting = self.coordinator.num_waiting()
        call = Call(lambda: self.push(worker, gradient))
        until(lambda: call.is_done or self.coordinator.num_waiting() > waiting)
        return call


# What TensorFlow did.

GOLDEN_OPTIMIZERS: dict[str, Callable[[], gpuopt.Optimizer]] = {
    "sgd": lambda: gpuopt.GradientDescentOptimizer(0.5),
    "momentum": lambda: gpuopt.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: gpuopt.AdamOptimizer(0.1),
}

# A sparse Adam's decay needs no gradient, so TensorFlow's queue runner has already done the next
# step's when it waits for the gradients of that step.
DECAYED_BEFORE_THE_STEP = {
    ("adam_2of2_ema", "state/b/Adam"): np.float32(0.9),
    ("adam_2of2_ema", "state/b/Adam_1"): np.float32(0.999),
}


def golden_gradients(grads: dict[str, Any], a: Variable, b: Variable) -> list[Any]:
    values = np.array(grads["b_values"], np.float32).reshape(-1, 2)
    rows = IndexedSlices(values, np.array(grads["b_indices"], np.int64), b.shape)
    return [(np.array(grads["a"], np.float32), a), (rows, b)]


def num_pushes(coordinator: Coordinator) -> int:
    return sum(figures.accepted + figures.stale for figures in coordinator.figures())


def is_at_rest(coordinator: Coordinator, calls: dict[int, list[Call]]) -> bool:
    """Whether every call is over or waits, and no update goes on."""
    if coordinator._updating_worker is not None:
        return False
    unfinished = sum(not call.is_done for of_worker in calls.values() for call in of_worker)
    return coordinator.num_waiting() == unfinished


@pytest.mark.parametrize("case", read_json("sync_replicas.json"), ids=lambda case: case["tag"])
def test_replays_tensorflows_events(case: dict[str, Any]) -> None:
    tag = case["tag"]
    a = Variable(np.array(case["a0"], np.float32), name="a")
    b = Variable(np.array(case["b0"], np.float32), name="b")
    step = new_step()
    averages = gpuopt.ExponentialMovingAverage(0.5) if case["variable_averages"] else None
    sync = SyncReplicasOptimizer(
        GOLDEN_OPTIMIZERS[tag.partition("_")[0]](),
        case["replicas_to_aggregate"],
        case["total_num_replicas"],
        averages,
        [a, b] if averages else None,
    )
    coordinator = sync.start(step, case["init_num_tokens_arg"], timeout_s=LONG_S)
    assert coordinator.tokens_per_step == case["tokens_per_step"]
    workers = [sync.worker(index) for index in range(case["total_num_replicas"])]
    calls: dict[int, list[Call]] = {worker.index: [] for worker in workers}
    for position, event in enumerate(case["events"]):
        for index in event.get("workers", []):
            pairs = golden_gradients(event["grads"][str(index)], a, b)
            pushes = num_pushes(coordinator)
            calls[index].append(Call(lambda i=index, p=pairs: workers[i].apply_gradients(p, step)))
            # TensorFlow runs them at the same time; one after the other is one of its orders.
            until(lambda n=pushes: num_pushes(coordinator) > n and is_at_rest(coordinator, calls))
        blocked = [index for index in calls if any(not call.is_done for call in calls[index])]
        key = f"{tag}/{position}"
        assert blocked == sorted(event.get("blocked_after", [])), key
        assert int(step) == event["global_step"], key
        assert coordinator.num_tokens() == event["queue_size"], key
        assert [coordinator.num_accumulated(v) for v in (a, b)] == event["accumulated"], key
        assert [worker.local_step for worker in workers] == event["local_steps"], key
        check("sync_replicas", f"{key}/a", a.numpy(), event["a"], FLOAT32_TOLERANCE)
        check("sync_replicas", f"{key}/b", b.numpy(), event["b"], FLOAT32_TOLERANCE)
        if position == 0:
            continue  # TensorFlow makes its state before the first step
        state = {variable.name: variable for variable in sync.variables()}
        if averages is not None:
            state |= {f"ema/{v.name}": averages.average(v) for v in (a, b)}
        for name, expected in event.items():
            if name.startswith("state/"):
                got = state[name.removeprefix("state/")].numpy()
                got = got * DECAYED_BEFORE_THE_STEP.get((tag, name), 1)
                check("sync_replicas", f"{key}/{name}", got, expected, FLOAT32_TOLERANCE)
    coordinator.close()
    for call in (call for of in calls.values() for call in of):
        error = call.join().error
        assert error is None or isinstance(error, CancelledError)
