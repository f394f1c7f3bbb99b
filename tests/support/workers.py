"""Workers that train by contrib's optimizers, and the same by a naive model in numpy.

`python workers.py FOLDER`, as one rank of a job, writes there what `trace` returns for each kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.distributed import Communicator, MPIGroup

KINDS = ["elastic", "elastic together", "model", "agn"]
NUM_STEPS, PERIOD = 7, 3
RATE, MOMENTUM, BETA1, BETA2, EPSILON = (
    np.float64(number) for number in (0.1, 0.5, 0.8, 0.95, 1e-3)
)
MOVING_RATE = 0.25
ROWS = [np.array([0, 2, 2]), np.array([3]), np.array([1, 0])]
START = {"w": np.arange(5.0), "table": np.ones((4, 2)), "idle": np.full(3, 7.0)}


def target(rank: int) -> np.ndarray:
    return np.random.default_rng((1, rank)).standard_normal(5)


def rows_of(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A sparse gradient of the table: (values, rows), of which some are repeated."""
    rows = ROWS[(rank + step) % len(ROWS)]
    return np.random.default_rng((2, rank, step)).standard_normal((len(rows), 2)), rows


def idle_of(rank: int, step: int) -> np.ndarray | None:
    """A gradient that only worker 1 has."""
    return np.random.default_rng((3, step)).standard_normal(3) if rank == 1 else None


def make_getter(kind: str, communicator: Communicator | None = None, device: Any = None) -> Any:
    cls = {"model": gpuopt.ModelAverageCustomGetter, "agn": gpuopt.AGNCustomGetter}
    found = cls.get(kind, gpuopt.ElasticAverageCustomGetter)
    return found(device, communicator=communicator)


def make_optimizer(kind: str, getter: Any, opt: Any = None, period: int = PERIOD) -> Any:
    """Makes an optimizer of a worker; by default around the one that `Model` knows."""
    size, rank = getter.communicator.size, getter.communicator.rank
    if opt is None and kind == "agn":
        opt = gpuopt.AdamOptimizer(RATE, BETA1, BETA2, EPSILON)
    elif opt is None:
        opt = gpuopt.MomentumOptimizer(RATE, MOMENTUM)
    if kind == "agn":
        return gpuopt.AGNOptimizer(opt, size, getter, period)
    if kind == "model":
        return gpuopt.ModelAverageOptimizer(opt, size, rank == 0, getter, period)
    return gpuopt.ElasticAverageOptimizer(
        opt, size, getter, period, MOVING_RATE, synchronous=kind == "elastic together"
    )


def trace(kind: str, communicator: Communicator) -> list[Any]:
    """Trains; returns what one worker has after each step: variables, centers, global step."""
    rank = communicator.rank
    getter = make_getter(kind, communicator)
    variables = {name: getter.variable(value, name=name) for name, value in START.items()}
    w, mine = variables["w"], target(rank)
    optimizer = make_optimizer(kind, getter)
    global_step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    traced = []
    for step in range(NUM_STEPS):
        pairs = optimizer.compute_gradients(lambda: 0.5 * ((w - mine) ** 2).sum(), [w])
        pairs.append((IndexedSlices(*rows_of(rank, step)), variables["table"]))
        pairs.append((idle_of(rank, step), variables["idle"]))
        optimizer.apply_gradients(pairs, global_step)
        arrays = [[v.numpy(), getter.center(v).numpy()] for v in variables.values()]
        traced.append([[[a.ravel().tolist() for a in both] for both in arrays], int(global_step)])
    return traced


class Worker:
    """A worker of the model."""

    def __init__(self) -> None:
        self.values = {name: value.copy() for name, value in START.items()}
        self.seen = {name: value.copy() for name, value in START.items()}
        self.sums = {name: np.zeros_like(value) for name, value in START.items()}
        self.slots: dict[str, Any] = {}
        self.powers = [np.float32(BETA1), np.float32(BETA2)]


class Model:
    """What `trace` should have returned, of all workers, in float64."""

    def __init__(self, kind: str, num_workers: int) -> None:
        self.kind, self.size = kind, num_workers
        self.workers = [Worker() for _ in range(num_workers)]
        self.centers = {name: value.copy() for name, value in START.items()}
        self.slots: dict[str, Any] = {}
        self.count = 0

    def run(self) -> list[list[Any]]:
        traced: list[list[Any]] = [[] for _ in self.workers]
        for step in range(NUM_STEPS):
            for rank, worker in enumerate(self.workers):
                self._local_step(rank, worker, step)
            if (step + 1) % PERIOD == 0:
                self._meet()
            for rank, worker in enumerate(self.workers):
                arrays = [
                    [each[name].ravel().tolist() for each in (worker.values, self.centers)]
                    for name in START
                ]
                traced[rank].append([arrays, self.count])
        return traced

    def _local_step(self, rank: int, worker: Worker, step: int) -> None:
        gradients = {"w": worker.values["w"] - target(rank), "table": np.zeros((4, 2))}
        if self.kind.startswith("elastic"):
            rho = MOVING_RATE / RATE
            gradients["w"] = gradients["w"] + rho * (worker.values["w"] - worker.seen["w"])
        values, rows = rows_of(rank, step)
        for value, row in zip(values, rows, strict=True):
            gradients["table"][row] += value
        idle = idle_of(rank, step)
        if idle is not None:
            gradients["idle"] = idle
        for name, gradient in gradients.items():
            worker.sums[name] += gradient
        touched = None if self.kind == "agn" else {"table": np.unique(rows)}
        self._step(worker.values, worker.slots, worker.powers, gradients, touched)

    def _step(self, values: Any, slots: Any, powers: Any, gradients: Any, touched: Any) -> None:
        """A step of Adam if `touched` is None; else of momentum, which leaves other rows alone."""
        for name, g in gradients.items():
            w = values[name]
            if touched is None:
                m, v = slots.setdefault(name, [np.zeros_like(w), np.zeros_like(w)])
                m += (g - m) * (1 - BETA1)
                v += (g * g - v) * (1 - BETA2)
                p1, p2 = (np.float64(power) for power in powers)
                w -= RATE * np.sqrt(1 - p2) / (1 - p1) * m / (np.sqrt(v) + EPSILON)
            else:
                [m] = slots.setdefault(name, [np.zeros_like(w)])
                for row in touched.get(name, range(len(w))):
                    m[row] = MOMENTUM * m[row] + g[row]
                    w[row] -= RATE * m[row]
        powers[0] *= np.float32(BETA1)
        powers[1] *= np.float32(BETA2)

    def _meet(self) -> None:
        names = [name for name in START if name != "idle" or self.size > 1]
        if self.kind == "model":
            self.count += 1
            for name in names:
                mean = sum(worker.values[name] for worker in self.workers) / self.size
                self.centers[name] = mean
                for worker in self.workers:
                    worker.values[name] = mean.copy()
            return
        self.count += self.size
        first_met = {name: center.copy() for name, center in self.centers.items()}
        for rank, worker in enumerate(self.workers):
            if self.kind == "agn":
                own = [name for name in names if name != "idle" or rank == 1]
                means = {name: worker.sums[name] / PERIOD for name in own}
                self._step(self.centers, self.slots, worker.powers, means, None)
            for name in names:
                if self.kind == "agn":
                    worker.values[name] = self.centers[name].copy()
                    worker.sums[name] = np.zeros_like(worker.sums[name])
                    continue
                met = first_met if self.kind == "elastic together" else self.centers
                worker.seen[name] = met[name].copy()
                difference = worker.values[name] - met[name]
                worker.values[name] = worker.values[name] - MOVING_RATE * difference
                self.centers[name] = self.centers[name] + MOVING_RATE * difference


def assert_close(traces: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compares traces of all workers, whose sums may be rounded in another order."""
    for got, want in zip(traces, expected, strict=True):
        for (arrays, count), (other_arrays, other_count) in zip(got, want, strict=True):
            assert count == other_count
            for pair, other_pair in zip(arrays, other_arrays, strict=True):
                for array, other in zip(pair, other_pair, strict=True):
                    np.testing.assert_allclose(array, other, rtol=1e-12, atol=1e-14)


def main(folder: Path) -> None:
    group = MPIGroup(20.0)
    for kind in KINDS:
        [traced] = group.run(partial(trace, kind))
        (folder / f"{kind}.{group.rank}.json").write_text(json.dumps(traced))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
