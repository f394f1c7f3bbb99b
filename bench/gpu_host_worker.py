"""Times one workload of gpu_host.py, with whatever gpuopt the process finds.

It reads what it needs to know from its input, as JSON, and imports nothing of `bench`, so that the
gpuopt that it finds may be of another commit.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import cupy
import numpy as np

import gpuopt

_SECONDS = 0.5
_SAMPLES = 7
# Of the sparse workloads' gradients and tables.
_ROWS, _HEIGHT, _WIDTH = 65_536, 1_000_000, 4


def main() -> None:
    print(json.dumps(_samples_us(make_step(**json.load(sys.stdin)))))


def make_step(
    *,
    shapes: Sequence[Sequence[int]] = (),
    num_sets: int = 1,
    num_tables: int = 0,
    num_groups: int = 1,
) -> Callable[[], None]:
    """Returns a function that makes one step; lists of pairs are made before.

    Args:
        shapes: Of variables with dense gradients, for Adam.
        num_sets: How many sets of these gradients take turns.
        num_tables: How many variables with sparse gradients there are instead, for Adagrad.
        num_groups: How many learning rates the variables with dense gradients have.
    """
    return _sparse_step(num_tables) if num_tables else _dense_step(shapes, num_sets, num_groups)


def _dense_step(
    shapes: Sequence[Sequence[int]], num_sets: int, num_groups: int
) -> Callable[[], None]:
    variables = [gpuopt.Variable(np.zeros(each, np.float32), device="gpu:0") for each in shapes]
    sets = [[(cupy.zeros(v.shape, np.float32), v) for v in variables] for _ in range(num_sets)]
    more: dict[str, Any] = (
        {} if num_groups == 1 else {"groups": _list_groups(variables, num_groups)}
    )
    optimizer = gpuopt.AdamOptimizer(1e-3, **more)
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        optimizer.apply_gradients(sets[turn % num_sets])

    return step


def _list_groups(variables: Sequence[gpuopt.Variable], num_groups: int) -> list[Any]:
    return [
        gpuopt.ParameterGroup(variables=variables[number::num_groups], learning_rate=1e-4 * number)
        for number in range(1, num_groups)
    ]


def _sparse_step(num_tables: int) -> Callable[[], None]:
    values, rows = cupy.zeros((_ROWS, _WIDTH), np.float32), cupy.zeros(_ROWS, np.int64)
    pairs: list[Any] = [
        (
            gpuopt.IndexedSlices(values, rows),
            gpuopt.Variable(cupy.zeros((_HEIGHT, _WIDTH), np.float32)),
        )
        for _ in range(num_tables)
    ]
    optimizer = gpuopt.AdagradOptimizer(1e-3)
    return lambda: optimizer.apply_gradients(pairs)


def _samples_us(step: Callable[[], None]) -> list[float]:
    for _ in range(8):
        step()
    gc.collect()
    gc.freeze()
    started = perf_counter()
    step()
    steps = max(3, int(_SECONDS / _SAMPLES / (perf_counter() - started)))
    samples = []
    for _ in range(_SAMPLES):
        started = perf_counter()
        for _ in range(steps):
            step()
        samples.append(1e6 * (perf_counter() - started) / steps)
    return samples


if __name__ == "__main__":
    main()
