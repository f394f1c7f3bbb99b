"""TensorFlow's logs of synchronous workers, and how to replay them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from golden_cases import check, read_json
from sync_training import LONG_S, Call, new_step, until

import gpuopt
from gpuopt import IndexedSlices, SyncReplicasOptimizer, Variable
from gpuopt.distributed import Coordinator

FLOAT32_TOLERANCE = 3e-6
CASES: list[dict[str, Any]] = read_json("sync_replicas.json")

OPTIMIZERS: dict[str, Callable[[], gpuopt.Optimizer]] = {
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


class Replay:
    """Variables and an optimizer for one of `CASES`."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.a = Variable(np.array(case["a0"], np.float32), name="a")
        self.b = Variable(np.array(case["b0"], np.float32), name="b")
        self.step = new_step()
        self.averages = gpuopt.ExponentialMovingAverage(0.5) if case["variable_averages"] else None
        self.sync = SyncReplicasOptimizer(
            OPTIMIZERS[case["tag"].partition("_")[0]](),
            case["replicas_to_aggregate"],
            case["total_num_replicas"],
            self.averages,
            [self.a, self.b] if self.averages else None,
        )

    def pairs(self, position: int, worker: int) -> list[Any]:
        """Returns the gradients that a worker pushes in an event."""
        grads = self.case["events"][position]["grads"][str(worker)]
        values = np.array(grads["b_values"], np.float32).reshape(-1, 2)
        rows = IndexedSlices(values, np.array(grads["b_indices"], np.int64), self.b.shape)
        return [(np.array(grads["a"], np.float32), self.a), (rows, self.b)]

    def snapshot(self, coordinator: Coordinator) -> dict[str, Any]:
        """Returns what an event of TensorFlow's log tells of the variables' side."""
        state = {variable.name: variable for variable in self.sync.variables()}
        if self.averages is not None:
            averages = {f"ema/{v.name}": self.averages.average(v) for v in (self.a, self.b)}
            state |= {name: average for name, average in averages.items() if average is not None}
        return {
            "global_step": int(self.step),
            "queue_size": coordinator.num_tokens(),
            "accumulated": [coordinator.num_accumulated(v) for v in (self.a, self.b)],
            "a": self.a.numpy().tolist(),
            "b": self.b.numpy().tolist(),
            **{f"state/{name}": variable.numpy().tolist() for name, variable in state.items()},
        }

    def check(self, position: int, snapshot: dict[str, Any]) -> None:
        """Compares what came of an event with what TensorFlow had then."""
        tag, event = self.case["tag"], self.case["events"][position]
        key = f"{tag}/{position}"
        for name in ("global_step", "queue_size", "accumulated"):
            assert snapshot[name] == event[name], (key, name)
        compared = ["a", "b"]
        if position > 0:  # TensorFlow makes its state before the first step
            compared += [name for name in event if name.startswith("state/")]
        for name in compared:
            got = np.array(snapshot[name], np.float32)
            got = got * DECAYED_BEFORE_THE_STEP.get((tag, name), 1)
            check("sync_replicas", f"{key}/{name}", got, event[name], FLOAT32_TOLERANCE)


def num_pushes(coordinator: Coordinator) -> int:
    return sum(figures.accepted + figures.stale for figures in coordinator.figures())


def is_at_rest(coordinator: Coordinator, calls: dict[int, list[Call]]) -> bool:
    """Whether every call is over or waits, and no update goes on."""
    if coordinator._updating:
        return False
    unfinished = sum(not call.is_done for of_worker in calls.values() for call in of_worker)
    return coordinator.num_waiting() == unfinished


def replay_in_threads(
    replay: Replay, look: Callable[[int, dict[str, Any], list[int], list[int]], None]
) -> Coordinator:
    """Replays a log by a thread for each push; returns the closed coordinator.

    Args:
        replay: The log.
        look: Called after each event with its position, a snapshot, the workers that wait, and all
            workers' local steps.
    """
    case, step = replay.case, replay.step
    coordinator = replay.sync.start(step, case["init_num_tokens_arg"], timeout_s=LONG_S)
    assert coordinator.tokens_per_step == case["tokens_per_step"]
    workers = [replay.sync.worker(index) for index in range(case["total_num_replicas"])]
    calls: dict[int, list[Call]] = {worker.index: [] for worker in workers}
    for position, event in enumerate(case["events"]):
        for index in event.get("workers", []):
            pairs = replay.pairs(position, index)
            pushes = num_pushes(coordinator)
            calls[index].append(Call(lambda i=index, p=pairs: workers[i].apply_gradients(p, step)))
            # TensorFlow runs them at the same time; one after the other is one of its orders.
            until(lambda n=pushes: num_pushes(coordinator) > n and is_at_rest(coordinator, calls))
        blocked = [index for index in calls if any(not call.is_done for call in calls[index])]
        local_steps = [worker.local_step for worker in workers]
        look(position, replay.snapshot(coordinator), blocked, local_steps)
    coordinator.close()
    for call in (call for of in calls.values() for call in of):
        error = call.join().error
        assert error is None or isinstance(error, gpuopt.CancelledError)
    return coordinator
