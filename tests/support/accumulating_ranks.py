"""Replicas that accumulate gradients, in threads and in processes, and the same in numpy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import gpuopt
from gpuopt import GradientAccumulationOptimizer, IndexedSlices

# All are exact in binary, and gradients are small whole numbers: sums in any order are the same.
RATE, MOMENTUM, MICRO_STEPS, NUM_CALLS = 0.5, 0.5, 3, 8
W_SHAPE, TABLE_SHAPE = (5,), (6, 2)


def gradients_of(call: int, rank: int) -> tuple[Any, Any, Any]:
    """Returns a rank's gradient for "w", and that for "table" as values and rows."""
    rng = np.random.default_rng((call, rank))
    rows = rng.integers(0, TABLE_SHAPE[0], rank + call % 2)
    values = rng.integers(-8, 9, (len(rows), TABLE_SHAPE[1]))
    return rng.integers(-8, 9, W_SHAPE), values, rows


class Model:
    """Two mirrored variables, which momentum trains by gradients of `MICRO_STEPS` calls."""

    def __init__(
        self, strategy: gpuopt.MirroredStrategy, dtype: Any = np.float32, **options: Any
    ) -> None:
        self.strategy, self.dtype = strategy, dtype
        self.w = strategy.variable(np.zeros(W_SHAPE, dtype), name="w")
        self.table = strategy.variable(np.ones(TABLE_SHAPE, dtype), name="table")
        self.step = gpuopt.Variable(np.int64(0), name="step")
        self.inner = gpuopt.MomentumOptimizer(RATE, MOMENTUM)
        self.optimizer = GradientAccumulationOptimizer(self.inner, MICRO_STEPS, **options)

    def pairs(self, call: int) -> list[Any]:
        """Returns what the replica on this thread brings to a call."""
        dense, values, rows = gradients_of(call, self.strategy.communicator.rank)
        on = gpuopt.backends.to_device
        device = self.w.local.device
        slices = IndexedSlices(on(values.astype(self.dtype), device), on(rows, device))
        return [(on(dense.astype(self.dtype), device), self.w), (slices, self.table)]

    def call(self, call: int) -> None:
        self.strategy.run(lambda: self.optimizer.apply_gradients(self.pairs(call), self.step))

    def train(self, calls: Iterable[int]) -> None:
        for call in calls:
            self.call(call)

    def end(self) -> None:
        """Updates by what there is."""
        self.strategy.run(lambda: self.optimizer.apply_accumulated(self.step))

    def values(self) -> list[Any]:
        """Returns what each copy is, all of "w" first."""
        return [copy.numpy().tolist() for each in (self.w, self.table) for copy in each.replicas]


def expected_values(num_ranks: int, *updates: Iterable[int], divide: bool = True) -> list[Any]:
    """Returns what "w" and "table" are after updates, each by the gradients of some calls."""
    w, table = np.zeros(W_SHAPE), np.ones(TABLE_SHAPE)
    momenta = np.zeros(W_SHAPE), np.zeros(TABLE_SHAPE)
    for calls in map(list, updates):
        sums, is_named = [np.zeros(W_SHAPE), np.zeros(TABLE_SHAPE)], np.zeros(TABLE_SHAPE[0], bool)
        for call in calls:
            for rank in range(num_ranks):
                dense, values, rows = gradients_of(call, rank)
                sums[0] += dense
                np.add.at(sums[1], rows, values)
                is_named[rows] = True
        for value, momentum, total, moved in zip(
            (w, table), momenta, sums, (np.ones(W_SHAPE, bool), is_named), strict=True
        ):
            mean = total / (len(calls) if divide else 1)
            momentum[moved] = MOMENTUM * momentum[moved] + mean[moved]
            value[moved] -= RATE * momentum[moved]
    return [w.tolist(), table.tolist()]


def accumulate(strategy: gpuopt.MirroredStrategy) -> Any:
    """Makes two updates of three calls and one of two; returns the steps and all copies."""
    model = Model(strategy, reduction="sum")
    model.train(range(NUM_CALLS))
    steps = int(model.step)
    model.end()
    return [steps, int(model.step), model.values()]


def leave_out_in_one(strategy: gpuopt.MirroredStrategy) -> Any:
    """The last replica brings NaN to the second of four calls, which all leave out."""
    model = Model(strategy, reduction="sum", on_nonfinite="skip")

    def call(number: int) -> None:
        pairs = model.pairs(number)
        if number == 1 and strategy.communicator.rank == strategy.num_replicas_in_sync - 1:
            pairs[0] = np.full(W_SHAPE, np.nan, np.float32), model.w
        model.optimizer.apply_gradients(pairs, model.step)

    for number in range(4):
        strategy.run(call, (number,))
    return [int(model.step), model.values()]


def save_in_the_middle(strategy: gpuopt.MirroredStrategy) -> list[str]:
    """Returns what is raised by who reads the sums of one process, or brings them to all."""
    told = []

    def attempt(function: Any, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
        else:
            told.append("nothing")

    model = Model(strategy, reduction="sum")
    named = {"w": model.w.replicas[0], "table": model.table.replicas[0]}
    model.call(0)
    attempt(model.optimizer.state_dict, named)
    model.train([1, 2])
    attempt(model.optimizer.state_dict, named)
    alone = GradientAccumulationOptimizer(gpuopt.MomentumOptimizer(RATE, MOMENTUM), 1)
    for steps in (1, 3):  # the second call is the first one of three
        alone.accumulation_steps = steps
        alone.apply_gradients([(np.ones(v.shape, np.float32), v) for v in named.values()])
    model.optimizer.load_state_dict(alone.state_dict(named), named)
    attempt(model.call, 3)
    attempt(model.end)
    model.optimizer.reset()
    attempt(model.call, 3)
    return told
