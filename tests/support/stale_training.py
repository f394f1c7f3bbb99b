"""Workers of a DropStaleGradientOptimizer that push in a given order, and the same in numpy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

import gpuopt
from gpuopt import DropStaleGradientOptimizer, IndexedSlices, Variable

# Powers of 2, so that products are exact and there is one rounding, fused or not.
RATE, MOMENTUM = 0.25, 0.5
NUM_PUSHES = 8  # of each worker
SHAPES = {"w": (5,), "table": (6, 2), "idle": (3,)}
FIRST_STALENESS = 2.0  # what the counter has in the beginning


def new_order(num_workers: int, seed: int) -> list[int]:
    """Returns which worker pushes when."""
    workers = np.repeat(np.arange(num_workers), NUM_PUSHES)
    order: list[int] = np.random.default_rng(seed).permutation(workers).tolist()
    return order


def target(worker: int) -> np.ndarray:
    return np.random.default_rng((1, worker)).standard_normal(5).astype(np.float32)


def rows_of(worker: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A sparse gradient: (values, rows), in any order, repeated, or none."""
    rng = np.random.default_rng((2, worker, number))
    rows = rng.integers(0, 6, rng.integers(0, 5))
    return rng.standard_normal((len(rows), 2)).astype(np.float32), rows


def idle_of(worker: int, number: int) -> np.ndarray | None:
    """A gradient that there is but sometimes."""
    rng = np.random.default_rng((3, worker, number))
    return rng.standard_normal(3).astype(np.float32) if rng.random() < 0.4 else None


class Training:
    """The variables and optimizer of a training."""

    def __init__(self, staleness: int, start: float = 0.0) -> None:
        """Makes them.

        Args:
            staleness: The optimizer's.
            start: What all values begin with.
        """
        values = {name: np.full(shape, start, np.float32) for name, shape in SHAPES.items()}
        self.variables = [Variable(value, name=name) for name, value in values.items()]
        self.step = Variable(int(start), name="global_step", trainable=False, dtype=np.int64)
        inside = gpuopt.MomentumOptimizer(RATE, MOMENTUM)
        self.optimizer = DropStaleGradientOptimizer(inside, staleness)
        self.optimizer.stale_counter.assign(FIRST_STALENESS + start)

    def train(
        self,
        worker: Any,
        turn: Callable[[int], AbstractContextManager[Any]],
        begin: Callable[[], object],
    ) -> None:
        """Does what a worker does.

        Args:
            worker: A DropStaleGradientWorker.
            turn: Waits until a worker of this index is to push.
            begin: Waits until all workers have computed their first gradients.
        """
        pairs = self._compute(worker, 0)
        begin()
        for number in range(1, NUM_PUSHES + 1):
            with turn(worker.index):
                worker.apply_gradients(pairs, self.step)
                pairs = self._compute(worker, number)

    def _compute(self, worker: Any, number: int) -> list[Any]:
        w, table, idle = self.variables
        mine = target(worker.index)
        pairs = worker.compute_gradients(lambda: 0.5 * ((w - mine) ** 2).sum(), [w])
        rows = IndexedSlices(*rows_of(worker.index, number))
        return [*pairs, (rows, table), (idle_of(worker.index, number), idle)]

    def outcome(self, figures: Sequence[Any]) -> list[Any]:
        """Returns all values as bits, and what was counted."""
        values = [*self.variables, self.step, self.optimizer.stale_counter]
        bits = [variable.numpy().tobytes().hex() for variable in values]
        return [bits, [[each.accepted, each.stale] for each in figures]]


class Turns:
    """The order in which threads push."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._changed = threading.Condition()

    def __call__(self, index: int) -> Turns:
        with self._changed:
            assert self._changed.wait_for(lambda: self._order[0] == index, 20.0)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._order.pop(0)
            self._changed.notify_all()


def replay(num_workers: int, staleness: int, order: Sequence[int]) -> list[Any]:
    """Returns what `Training.outcome` should be, by loops in numpy over one gradient at a time."""
    values = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    slots = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    step, dropped = 0, FIRST_STALENESS
    figures = [[0, 0] for _ in range(num_workers)]
    seen = [({name: value.copy() for name, value in values.items()}, step)] * num_workers
    for worker in order:
        read, local_step = seen[worker]
        number = sum(figures[worker])
        if step - local_step > staleness:
            figures[worker][1] += 1
            dropped += 1
        else:
            figures[worker][0] += 1
            step += 1
            dense = {"w": read["w"] - target(worker), "idle": idle_of(worker, number)}
            for name, gradient in dense.items():
                if gradient is not None:
                    slots[name] = np.float32(MOMENTUM) * slots[name] + gradient
                    values[name] = values[name] - np.float32(RATE) * slots[name]
            sums: dict[int, np.ndarray] = {}
            for value, row in zip(*rows_of(worker, number), strict=True):
                sums[row] = sums[row] + value if row in sums else value
            for row, gradient in sums.items():
                slot = slots["table"]
                slot[row] = np.float32(MOMENTUM) * slot[row] + gradient
                values["table"][row] -= np.float32(RATE) * slot[row]
        seen[worker] = {name: value.copy() for name, value in values.items()}, step
    arrays = [*values.values(), np.int64(step), np.float32(dropped)]
    return [[array.tobytes().hex() for array in arrays], figures]
