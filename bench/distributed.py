"""The cost of combining several workers' gradients, compared with the arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import gpuopt
from bench.harness import Workload

_FLOATS = 1000
_WORKERS = 3
_REPEATS = 100
_ROWS, _WIDTH, _HEIGHT = 10_000, 64, 100_000
_STEPS = 200


def make_workloads() -> Iterator[Workload]:
    yield make_dense_accumulator()
    yield make_sync_step()
    yield make_sparse_accumulator()


def make_dense_accumulator() -> Workload:
    """Makes the workload of three small gradients and a take: it shows the cost of calls."""
    gradients = list(np.random.default_rng(0).standard_normal((_WORKERS, _FLOATS), np.float32))
    accumulator = gpuopt.distributed.ConditionalAccumulator(np.float32, (_FLOATS,))
    total = np.empty(_FLOATS, np.float32)

    def copy() -> None:
        total[...] = gradients[0]
        for gradient in gradients[1:]:
            np.add(total, gradient, out=total)
        total / np.float32(_WORKERS)  # `take_grad` also returns a new array

    return Workload(
        name="replicas_accumulate_1000_floats",
        description=f"{_WORKERS} gradients of {_FLOATS:,} float32 elements, and their mean",
        # Each gradient is read; the sum is written and read three times; the mean is written.
        bytes_moved=_REPEATS * _FLOATS * 4 * (_WORKERS + 2 * _WORKERS + 1),
        operations=_REPEATS,
        contenders={
            "gpuopt": _repeat(_apply_and_take(accumulator, gradients)),
            "the additions alone": _repeat(copy),
        },
    )


def make_sync_step() -> Workload:
    """Makes the workload of synchronous steps by two threads, and the same work by one."""
    gradient = np.ones(_FLOATS, np.float32)

    def on_threads() -> None:
        step, w = _make_step_and_variable()
        sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(0.1), 2)

        def train(worker: gpuopt.Optimizer) -> None:
            while int(step) < _STEPS:
                worker.apply_gradients([(gradient, w)], step)

        sync.run(train, step, 0)

    def alone() -> None:
        step, w = _make_step_and_variable()
        optimizer = gpuopt.GradientDescentOptimizer(0.1)
        accumulator = gpuopt.distributed.ConditionalAccumulator(np.float32, (_FLOATS,))
        for count in range(_STEPS):
            accumulator.apply_grad(gradient, count)
            accumulator.apply_grad(gradient, count)
            optimizer.apply_gradients([(accumulator.take_grad(2), w)], step)

    return Workload(
        name="replicas_step_of_2_threads",
        description=f"{_STEPS} steps of 2 workers on {_FLOATS:,} float32 elements",
        # A step reads both gradients, and writes and reads the sum, the mean and the weight.
        bytes_moved=_STEPS * _FLOATS * 4 * 8,
        operations=_STEPS,
        contenders={"gpuopt": on_threads, "one thread": alone},
    )


def make_sparse_accumulator() -> Workload:
    """Makes the workload of three workers' rows of a large table, some rows in common."""
    rng = np.random.default_rng(0)
    gradients = [
        gpuopt.IndexedSlices(
            rng.standard_normal((_ROWS, _WIDTH), np.float32),
            rng.choice(_HEIGHT, _ROWS, replace=False),
        )
        for _ in range(_WORKERS)
    ]
    accumulator = gpuopt.distributed.SparseConditionalAccumulator(np.float32, (_HEIGHT, _WIDTH))

    def add_at() -> None:
        indices = np.concatenate([gradient.indices for gradient in gradients])
        rows, inverse, counts = np.unique(indices, return_inverse=True, return_counts=True)
        sums = np.zeros((len(rows), _WIDTH), np.float32)
        np.add.at(sums, inverse, np.concatenate([gradient.values for gradient in gradients]))
        sums /= counts[:, None]

    return Workload(
        name="replicas_accumulate_rows",
        description=f"{_WORKERS} gradients of {_ROWS:,} rows of {_WIDTH} float32 elements, merged",
        # Each gradient is read once and the mean, of nearly as many rows, is written.
        bytes_moved=2 * _WORKERS * _ROWS * _WIDTH * 4,
        contenders={"gpuopt": _apply_and_take(accumulator, gradients), "numpy.add.at": add_at},
    )


def _apply_and_take(accumulator: Any, gradients: Sequence[Any]) -> Callable[[], None]:
    steps = 0

    def accumulate() -> None:
        nonlocal steps
        for gradient in gradients:
            accumulator.apply_grad(gradient, steps)
        accumulator.take_grad(_WORKERS)
        steps += 1

    return accumulate


def _repeat(function: Callable[[], None]) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(_REPEATS):
            function()

    return repeat


def _make_step_and_variable() -> tuple[gpuopt.Variable, gpuopt.Variable]:
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    return step, gpuopt.Variable(np.zeros(_FLOATS, np.float32), name="w")
