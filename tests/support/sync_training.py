"""Workers of a SyncReplicasOptimizer that push what a test tells them to, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import gpuopt
from gpuopt import IndexedSlices, SyncReplicasOptimizer, Variable

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


class SlowDescent(gpuopt.GradientDescentOptimizer):
    """An optimizer whose update waits until a test lets it end."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def _apply_dense(self, grad: Any, var: Variable) -> None:
        self.begun.set()
        assert self.may_end.wait(LONG_S)
        super()._apply_dense(grad, var)


class Problem:
    """Gradients that depend on who computes them, for which step, and on what was read."""

    def __init__(self) -> None:
        self.w = Variable(np.zeros(5, np.float32), name="w")
        self.table = Variable(np.ones((6, 2), np.float32), name="table")
        self.optimizer = gpuopt.MomentumOptimizer(0.1, 0.9, on_nonfinite="skip")

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        return self.w.numpy(), self.table.numpy()

    def pairs(self, worker: int, step: int, read: tuple[np.ndarray, np.ndarray]) -> list[Any]:
        rng = np.random.default_rng((worker, step))
        rows = rng.integers(0, 6, rng.integers(0, 5))  # in any order, repeated, or none
        values = rng.standard_normal((len(rows), 2)).astype(np.float32) + read[1][rows]
        dense = rng.standard_normal(5).astype(np.float32) - read[0]
        return [(dense, self.w), (IndexedSlices(values, rows, (6, 2)), self.table)]

    def replay(self, log: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Applies the mean of each step's gradients, one after the other, by loops over rows."""
        alone = Problem()
        for step, workers in enumerate(log):
            computed = [alone.pairs(worker, step, alone.read()) for worker in workers]
            total = np.zeros(5, np.float32)
            sums: dict[int, np.ndarray] = {}
            counts: dict[int, int] = {}
            for (dense, _), (slices, _) in computed:
                total = total + dense
                own: dict[int, np.ndarray] = {}
                for row, value in zip(slices.indices.tolist(), slices.values, strict=True):
                    own[row] = own.get(row, np.zeros(2, np.float32)) + value
                for row, value in own.items():
                    sums[row] = sums.get(row, np.zeros(2, np.float32)) + value
                    counts[row] = counts.get(row, 0) + 1
            rows = sorted(sums)
            means = [sums[row] / np.float32(counts[row]) for row in rows]
            mean_rows = np.array(means, np.float32).reshape(-1, 2)
            alone.optimizer.apply_gradients(
                [
                    (total / np.float32(len(workers)), alone.w),
                    (IndexedSlices(mean_rows, np.array(rows, np.int64)), alone.table),
                ]
            )
        return alone.read()

    def assert_is_replayed_by(self, log: list[list[int]]) -> None:
        for got, expected in zip(self.read(), self.replay(log), strict=True):
            assert got.tobytes() == expected.tobytes(), log
