"""Times the host's part of steps on GPUs, on GPUs that are not there.

    .venv/bin/python -m bench.gpu_host

Real CuPy runs on the tests' driver, which leaves kernels out. So this says what the host does in a
step, without what a real driver adds for each launch; and nothing of what a GPU does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.harness import ROOT, write_results

# The most microseconds of a step.
TARGETS = {
    "dense_adam_1_tensor": 40,
    "dense_adam_gpt2": 60,
    "dense_adam_gpt2_three_sets": 150,
    "dense_adam_10000x64": 1500,
    "sparse_adagrad_64k_rows": 120,
    "sparse_adagrad_26_tables": 600,
}
_DRIVER = ROOT / "tests" / "support" / "driver"
_SECONDS = 0.5
_SAMPLES = 7


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu_host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each workload")
    parser.add_argument("--against", metavar="CHECKOUT", help="another gpuopt, run in turn")
    parser.add_argument("--no-results", action="store_true", help="do not write a file")
    parser.add_argument("--worker", metavar="WORKLOAD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_samples_us(_steps(options.worker))))
        return
    checkouts = {"gpuopt": str(ROOT)}
    if options.against:
        checkouts["against"] = options.against
    table = Table(title="the host's part of a step, microseconds")
    for heading in ("workload", "target", *checkouts, "ratio"):
        table.add_column(heading, justify="right")
    measured = {}
    for workload, target in TARGETS.items():
        samples: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                samples[name].append(median(_in_process(checkout, workload)))
        medians = {name: round(median(times), 1) for name, times in samples.items()}
        ratio = medians["gpuopt"] / medians["against"] if options.against else None
        measured[workload] = {
            "description": f"the host's part of {workload}, without a driver's",
            "target_us": target,
            "median_us": medians,
            "samples_us": samples,
            "is_met": medians["gpuopt"] <= target,
        }
        shown = [str(value) for value in medians.values()]
        table.add_row(workload, str(target), *shown, "" if ratio is None else f"{ratio:.2f}")
    Console().print(table)
    if not options.no_results:
        results = {"against": options.against and _commit_of(options.against)}
        name = "driver that is not there"
        path = write_results({**results, "workloads": measured}, name=name)
        print(f"written: {path.relative_to(ROOT)}")


def _commit_of(checkout: str) -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(
        command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _in_process(checkout: str, workload: str) -> list[float]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([checkout, str(ROOT)]),
        "GPUOPT_DRIVER_STREAMS": "nothing",
        "GPUOPT_DRIVER_BLOCKS": "plain",
    }
    command = [sys.executable, str(_DRIVER), __file__, "--worker", workload]
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(finished.stdout.splitlines()[-1])  # type: ignore[no-any-return]


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


def _steps(workload: str) -> Callable[[], None]:
    """Returns a function that makes one step; lists of pairs are made before."""
    if workload.startswith("dense"):
        shapes: Sequence[tuple[int, ...]] = {
            "dense_adam_1_tensor": [(1000,)],
            "dense_adam_10000x64": [(64,)] * 10_000,
        }.get(workload, _gpt2_shapes())
        return _dense_steps(shapes, 3 if workload.endswith("three_sets") else 1)
    return _sparse_steps(26 if workload.endswith("tables") else 1)


def _dense_steps(shapes: Sequence[tuple[int, ...]], num_sets: int) -> Callable[[], None]:
    import cupy

    import gpuopt

    variables = [gpuopt.Variable(np.zeros(each, np.float32), device="gpu:0") for each in shapes]
    sets = [[(cupy.zeros(v.shape, np.float32), v) for v in variables] for _ in range(num_sets)]
    optimizer = gpuopt.AdamOptimizer(1e-3)
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        optimizer.apply_gradients(sets[turn % num_sets])

    return step


def _sparse_steps(num_tables: int) -> Callable[[], None]:
    import cupy

    import gpuopt

    values, rows = cupy.zeros((65_536, 4), np.float32), cupy.zeros(65_536, np.int64)
    pairs: list[Any] = [
        (
            gpuopt.IndexedSlices(values, rows),
            gpuopt.Variable(cupy.zeros((1_000_000, 4), np.float32)),
        )
        for _ in range(num_tables)
    ]
    optimizer = gpuopt.AdagradOptimizer(1e-3)
    return lambda: optimizer.apply_gradients(pairs)


def _gpt2_shapes() -> list[tuple[int, ...]]:
    """The 148 tensors of GPT-2's smallest model, narrower: their number counts here."""
    width = 64
    block = [
        *((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return [(500, width), (100, width), *block * 12, (width,), (width,)]


if __name__ == "__main__":
    main()
