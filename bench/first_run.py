"""Checks and times a few steps of gpuopt on this machine's GPU, and prints a block to paste.

    python first_run.py

It takes less than two minutes on a T4, and needs gpuopt and CuPy; torch's optimizers are timed
beside gpuopt's where torch finds the GPU. Paste the block into an issue, please.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import gmtime, perf_counter, strftime
from typing import Any, NamedTuple

try:
    import gpuopt
except ModuleNotFoundError as error:
    sys.exit(f"first_run.py needs gpuopt ({error}): pip install '.[cuda13]' in a checkout of it")
import numpy as np

from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.bench.clock import Clock, GpuClock, Step, make_gpu_copy
from gpuopt.bench.jobs import JOBS, RATE, Job, Place
from gpuopt.bench.machine import describe_commit
from gpuopt.bench.models import list_gpt2_shapes, shrink
from gpuopt.bench.results import Copies, Figures, Results, Run, make_figures, write_results
from gpuopt.bench.workloads import Task, Workload, make_chosen, make_run
from gpuopt.info import describe

_MOST_ROUNDS, _FEWEST_ROUNDS = 15, 3
_MOST_STEPS, _FEWEST_STEPS = 50, 3
# The device is kept busy for this multiple of the time that the host needs to enqueue a step.
_HEAD_START = 2.0
_MOST_HEAD_START_MS = 200.0
# The share of a task's time that is for making it and for its first steps.
_FOR_MAKING = 0.3
_COPY = "copy"


class Sizes(NamedTuple):
    """How large the tasks are.

    Attributes:
        large: The elements of each of four large tensors.
        many: How many small tensors.
        divisor: Each side of GPT-2's tensors is divided by this.
        table: The (height, width) of an embedding table.
        lookups: The rows of a sparse gradient.
        copied_bytes: What is copied, for comparison.
    """

    large: int = 40_000_000
    many: int = 10_000
    divisor: int = 1
    table: tuple[int, int] = (1_000_000, 128)
    lookups: int = 65_536
    copied_bytes: int = 2**31

    def that_fit(self, free_bytes: int) -> Sizes:
        """Returns smaller sizes where a GPU has less than about 9 GB to spare."""
        # Weights and two slots, both gpuopt's and torch's, a gradient, and clipping's.
        of_large = free_bytes // (4 * 4 * 8)
        return self._replace(
            large=min(self.large, of_large), copied_bytes=min(self.copied_bytes, free_bytes // 4)
        )


SMALL = Sizes(1000, 20, 64, (1000, 16), 500, 2**20)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="time limit of the timings (default: 90)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    parser.add_argument(
        "--commit",
        default=describe_commit(Path(__file__).resolve().parent),
        help="named in the results; by default, asks git",
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this program")
    options = parser.parse_args()
    reason = why_no_gpu()
    if reason is not None:
        print(f"nothing was run: {reason}")
        return 1
    date, described = strftime("%Y-%m-%d %H:%M", gmtime()), dict(describe())
    checks = {name: make_check(each) for name, each in CHECKS.items()}
    runs: Mapping[str, Run] = {}
    failures: dict[str, str] = {}
    try:
        for runs, failures in time_all(options.seconds, SMALL if options.small else Sizes()):
            if options.json is not None:
                device = described.get("gpu:0", "a GPU").partition(",")[0]
                machine = {**described, "checks": checks}
                about = gpuopt.__version__, date, device, machine
                write_results(Results(*about, dict(runs), failures, options.commit), options.json)
    except KeyboardInterrupt:
        failures["other timings"] = "stopped by Ctrl-C"
    except OSError as error:
        failures["other timings"] = f"stopped, since results cannot be written: {error}"
    print(make_block(f"{date}, commit {options.commit}", described, checks, runs, failures))
    return 1 if failures or any(checks.values()) else 0


# Checks


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def of_dense(make: Callable[[], gpuopt.Optimizer], dtype: str = "float32") -> Callable[[str], Any]:
    def run(device: str) -> list[np.ndarray]:
        optimizer = make()
        variables = [
            gpuopt.Variable(numbers(*shape), device=device, dtype=dtype, name=f"v{at}")
            for at, shape in enumerate([(1000, 33), (7,), ()])
        ]
        for step in range(3):
            gradients = [
                numbers(*each.shape, seed=1 + step).astype(each.dtype) for each in variables
            ]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        return [each.numpy().astype(np.float32) for each in variables]

    return run


def of_rows(make: Callable[[], gpuopt.Optimizer], num_rows: int) -> Callable[[str], Any]:
    def run(device: str) -> list[np.ndarray]:
        optimizer, height, width = make(), 5000, 20
        table = gpuopt.Variable(numbers(height, width), device=device, name="table")
        for step in range(3):
            rows = np.random.default_rng(step).zipf(1.3, num_rows) % height
            # Sums of these are exact in any order.
            values = np.round(8 * numbers(num_rows, width, seed=1 + step)) / 8
            optimizer.apply_gradients([(gpuopt.IndexedSlices(values, rows), table)])
        return [table.numpy()]

    return run


class Check(NamedTuple):
    """Three steps to compare.

    Attributes:
        run: Makes them on a device, and returns the variables.
        tolerance: How far they may be from numpy's.
    """

    run: Callable[[str], Sequence[np.ndarray]]
    tolerance: float = 1e-4


CHECKS: Mapping[str, Check] = {
    "Adam": Check(of_dense(lambda: gpuopt.AdamOptimizer(0.1))),
    "Adam, clip_norm": Check(of_dense(lambda: gpuopt.AdamOptimizer(0.1, clip_norm=1.0))),
    # Of 8 bits; each step rounds.
    "AdamW in bfloat16": Check(
        of_dense(lambda: gpuopt.AdamWOptimizer(0.01, 0.1), "bfloat16"), 2e-2
    ),
    "LAMB": Check(of_dense(lambda: gpuopt.LAMBOptimizer(0.1))),
    "LazyAdam, few rows": Check(of_rows(lambda: gpuopt.LazyAdamOptimizer(0.1), 300)),
    "Adagrad, many rows": Check(of_rows(lambda: gpuopt.AdagradOptimizer(0.1), 30_000)),
    "Adam, all rows": Check(of_rows(lambda: gpuopt.AdamOptimizer(0.1), 300)),
    "Adam, catch_up": Check(of_rows(lambda: gpuopt.AdamOptimizer(0.1, catch_up=True), 300)),
}


def make_check(given: Check) -> str | None:
    """Compares steps on the GPU with the same ones on the CPU; returns what is wrong, or None."""
    tolerance = given.tolerance
    try:
        for got, expected in zip(given.run("gpu:0"), given.run("cpu"), strict=True):
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    except Exception as error:  # the other checks still run
        return f"{type(error).__name__}: {error}".strip()
    return None


# Timings


def list_tasks(cupy: Any, sizes: Sizes) -> dict[str, Callable[[], Workload]]:
    """Returns what makes each step to time, with torch's where there is one to compare with."""
    place, adam = Place(cupy, "cuda"), JOBS["adam"]
    four = f"4 x {sizes.large:,}"
    large = Task("", "", [(sizes.large,)] * 4)
    gpt2 = Task("", "", shrink(list_gpt2_shapes(), sizes.divisor))
    many = Task("", "", [(64,)] * sizes.many)
    height, width = sizes.table
    table = Task("", "", [sizes.table], sizes.lookups)
    rows = f"{sizes.lookups:,} rows by Zipf's law of {height:,} x {width}"
    clipped = adam._replace(ours=lambda: gpuopt.AdamOptimizer(RATE, clip_norm=1.0))
    in_bytes = adam._replace(ours=lambda: gpuopt.AdamOptimizer(RATE, slot_bits=8))

    def make(
        task: Task, job: Job = adam, peer: str = "torch fused", num_bytes: float = 0
    ) -> Workload:
        made = make_chosen(task, job, place, ("gpuopt", peer))
        return replace(made, bytes_moved=round(num_bytes)) if num_bytes else made

    def make_copy() -> Workload:
        copy = make_gpu_copy(cupy, sizes.copied_bytes)
        return Workload("", {_COPY: copy}, 2 * sizes.copied_bytes)

    # A norm reads gradients once more; a slot in 8 bits has its share of a block's scale.
    by_norm, of_bytes = (each * large.num_parameters for each in (32, 16 + 1 / 16))
    return {
        f"copy of {sizes.copied_bytes:,} bytes": make_copy,
        f"Adam, {four}": lambda: make(large),
        f"Adam, GPT-2's {len(gpt2.shapes)} tensors": lambda: make(gpt2),
        f"Adam, {sizes.many:,} x 64": lambda: make(many),
        f"LazyAdam, {rows}": lambda: make(table, peer="torch sparse"),
        f"Adagrad, {rows}": lambda: make(table, JOBS["adagrad"], "torch sparse"),
        f"Adam, clip_norm, {four}": lambda: make(large, clipped, "", by_norm),
        f"Adam, slots in 8 bits, {four}": lambda: make(large, in_bytes, "", of_bytes),
    }


def time_all(seconds: float, sizes: Sizes) -> Iterator[tuple[Mapping[str, Run], dict[str, str]]]:
    """Times all tasks.

    Yields:
        (runs, failures) so far, after each task: of each one its results, with gpuopt's or the
        copy's figures first; or why it was not timed.
    """
    import cupy

    clock, deadline = GpuClock(cupy), perf_counter() + seconds
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    copies: Copies | None = None
    tasks = list_tasks(cupy, sizes.that_fit(cupy.cuda.runtime.memGetInfo()[0]))
    for number, (name, make) in enumerate(tasks.items()):
        limit = (1 - _FOR_MAKING) * (deadline - perf_counter()) / (len(tasks) - number)
        try:
            runs[name] = run = time_task(clock, name, make, limit, copies)
            if run.bytes_moved and (copy := run.contenders.get(_COPY)):
                copies = Copies(copy.usual.samples_ms, run.bytes_moved)
        except Exception as error:  # the other tasks are still timed
            failures[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        yield runs, failures


def time_task(
    clock: Clock, name: str, make: Callable[[], Workload], seconds: float, copies: Copies | None
) -> Run:
    """Makes a task's steps and times them; its arrays are free afterwards, also if it fails."""
    workload = replace(make(), description=name)
    share, copy_gb_per_s = seconds / len(workload.contenders), copies and copies.gb_per_s
    figures = {
        who: time_step(clock, step, share, workload.bytes_moved, copy_gb_per_s)
        for who, step in workload.contenders.items()
    }
    return make_run(workload, figures, copies)


def time_step(
    clock: Clock,
    step: Step,
    seconds: float,
    num_bytes: int | None,
    copy_gb_per_s: float | None = None,
) -> Figures:
    """Times a step; half of the time is for the device's times, and half for those of the host."""
    clock.synchronize()
    first = _host_ms(step)
    for _ in range(2):
        step()
    clock.synchronize()
    host_ms = _host_ms(step)
    head_start = min(_HEAD_START * host_ms + 0.1, _MOST_HEAD_START_MS)
    deadline = perf_counter() + seconds / 2
    clean: list[float] = []
    dirty: list[float] = []
    while len(clean) < _FEWEST_ROUNDS or (len(clean) < _MOST_ROUNDS and perf_counter() < deadline):
        clean.append(clock.device_ms(step, head_start))
        dirty.append(clock.device_ms(step, head_start, dirty=True))
    took = max(median(clean), host_ms)
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(500 * seconds / took)))
    begin = perf_counter()
    for _ in range(steps):
        step()
    host = 1e3 * (perf_counter() - begin) / steps
    clock.synchronize()
    wall = 1e3 * (perf_counter() - begin) / steps
    return make_figures(
        {"device": clean, "device_dirty": dirty, "wall": [wall], "host": [host]},
        num_bytes,
        copy_gb_per_s,
        first_step_ms=round(first, 3),
        wall_steps=steps,
    )


def _host_ms(step: Step) -> float:
    begin = perf_counter()
    step()
    return 1e3 * (perf_counter() - begin)


# The block to paste


def make_block(
    title: str,
    machine: Mapping[str, str],
    checks: Mapping[str, str | None],
    runs: Mapping[str, Run],
    failures: Mapping[str, str],
) -> str:
    lines = [f"gpuopt's first run, {title}"]
    lines += [f"{subject:<16} {answer}" for subject, answer in machine.items()]
    wrong = {name: reason for name, reason in checks.items() if reason is not None}
    lines += ["", f"{len(checks) - len(wrong)} of {len(checks)} checks agree with numpy"]
    lines += [f"{name}: {reason}" for name, reason in wrong.items()]
    names = [*runs, *failures]
    width = max(map(len, names)) if names else 0
    headings = [
        *("device us", "dirty L2", "wall us", "host us", "first ms", "GB/s", "of copy"),
        *("torch us", "torch wall"),
    ]
    lines += ["", " " * width + "".join(f"{each:>12}" for each in headings)]
    for name, run in runs.items():
        ours, *torchs = run.contenders.values()
        cells = [_write_us(ours, kind) for kind in ("device", "device_dirty", "wall", "host")]
        cells += [f"{ours.first_step_ms:.0f}", f"{ours.gb_per_s:.0f}"]
        cells += ["" if ours.share_of_copy is None else f"{ours.share_of_copy:.2f}"]
        cells += [_write_us(each, kind) for each in torchs for kind in ("device", "wall")]
        lines.append(f"{name:<{width}}" + "".join(f"{each:>12}" for each in cells))
    lines += [f"{name}: {reason}" for name, reason in failures.items()]
    return "\n".join(["```text", *lines, "```"])


def _write_us(figures: Figures, kind: str) -> str:
    return f"{1e3 * figures.times[kind].median_ms:.1f}"


if __name__ == "__main__":
    sys.exit(main())
