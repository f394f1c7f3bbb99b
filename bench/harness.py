"""Times contenders in turn, in one process, and writes down all samples."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import numpy as np

from gpuopt.backends.host_compiler import compiler
from gpuopt.backends.workers import num_threads, share_out

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
# gpuopt where nothing was compiled; it has ratios of its own.
NUMPY_ALONE = "gpuopt, numpy alone"
_WARM_UP_ROUNDS = 3
_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Workload:
    """One job that several contenders do.

    Attributes:
        name: Which job.
        description: What it is, in a sentence.
        bytes_moved: What a step must read and write at the least, where memory is the limit.
        contenders: Name to a function that does one step; ours is called "gpuopt".
        operations: How many operations a step has, where the cost of each counts.
        settle: Called after each step, and not timed: waits for what goes on in the background.
        peak_extra_bytes: What a step adds to a process's memory at its peak, by contender, where it
            was measured.
    """

    name: str
    description: str
    bytes_moved: int | None
    contenders: Mapping[str, Callable[[], object]]
    operations: int | None = None
    settle: Callable[[], object] = lambda: None
    peak_extra_bytes: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Timing:
    """One contender's samples, in milliseconds, and what follows from them.

    Attributes:
        ratio: Median over the rounds of gpuopt's time divided by this contender's.
        gb_per_s: `bytes_moved` by the median time, in 10^9 bytes a second.
        share_of_copy: Of the measured bandwidth of a copy.
        us_per_operation: The median time by `operations`, in microseconds.
        numpy_ratio: Median over the rounds of gpuopt's time on numpy alone divided by this
            contender's, if it took part.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float
    gb_per_s: float | None
    share_of_copy: float | None
    us_per_operation: float | None
    numpy_ratio: float | None
    samples_ms: list[float]


def measure(workload: Workload, rounds: int, copy_bytes_per_second: float) -> dict[str, Timing]:
    """Times every contender once in each round, so that a drifting machine hits all alike.

    The order is a new one in each round: what ran before leaves its traces in the caches.
    """
    shuffled = random.Random(0)
    contenders = list(workload.contenders.items())
    samples: dict[str, list[float]] = {name: [] for name in workload.contenders}
    for round_number in range(-_WARM_UP_ROUNDS, rounds):
        shuffled.shuffle(contenders)
        for name, step in contenders:
            started = perf_counter()
            step()
            elapsed_ms = 1e3 * (perf_counter() - started)
            workload.settle()
            if round_number >= 0:
                samples[name].append(elapsed_ms)
    return {
        name: timing(
            workload, times, samples["gpuopt"], samples.get(NUMPY_ALONE), copy_bytes_per_second
        )
        for name, times in samples.items()
    }


def timing(
    workload: Workload,
    times: list[float],
    ours: list[float],
    ours_numpy: list[float] | None,
    copy_bytes_per_second: float,
) -> Timing:
    """Sums up a contender's samples, in milliseconds; `ours` are those of the same rounds."""
    deciles = quantiles(times, n=10, method="inclusive")
    seconds = 1e-3 * median(times)
    speed = None if workload.bytes_moved is None else workload.bytes_moved / seconds
    each = None if workload.operations is None else seconds / workload.operations
    return Timing(
        median_ms=round(median(times), 4),
        p10_ms=round(deciles[0], 4),
        p90_ms=round(deciles[-1], 4),
        ratio=_ratio(ours, times),
        gb_per_s=None if speed is None else round(speed / 1e9, 2),
        share_of_copy=None if speed is None else round(speed / copy_bytes_per_second, 3),
        us_per_operation=None if each is None else round(1e6 * each, 2),
        numpy_ratio=None if ours_numpy is None else _ratio(ours_numpy, times),
        samples_ms=[round(time, 4) for time in times],
    )


def copy_bandwidth(rounds: int = 15) -> float:
    """Measures what copies in memory reach, in bytes read and written a second.

    As many threads copy as gpuopt uses for a large update.
    """
    source = np.ones(_COPY_BYTES // 8)
    target = np.zeros_like(source)
    threads = num_threads()
    parts = list(zip(np.split(target, 16), np.split(source, 16), strict=True))
    times = []
    for _ in range(rounds):
        started = perf_counter()
        share_out(lambda part: np.copyto(*part), parts, threads)
        times.append(perf_counter() - started)
    return 2 * _COPY_BYTES / median(times)


def machine() -> dict[str, Any]:
    """Says what the results were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": _version("torch"),
        "optax": _version("optax"),
        "jax": _version("jax"),
        "numba": _version("numba"),
        "compiler": " ".join(compiler() or []) or None,
        "threads": num_threads(),
    }


def write_results(
    results: Mapping[str, Any], name: str | None = None, output: Path = RESULTS
) -> Path:
    """Writes a file named after the machine, the date and the commit; returns its path.

    Workloads that this file has already, and that were not run again, stay in it.

    Args:
        results: Under "machine" and "commit", what was measured on and what was measured, if it is
            not this machine's CPU, and not what git says.
        name: The machine's; by default its CPU's.
        output: Where the machines' folders are.
    """
    described = {"machine": machine(), "commit": _commit(), **results}
    name = name or f"{_cpu_model()} {os.cpu_count()} cores"
    folder = output / re.sub(r"[^a-z0-9]+", "-", name.lower())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y-%m-%d}-{described['commit']}.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        described["workloads"] = earlier["workloads"] | described["workloads"]
    path.write_text(json.dumps(described, indent=1, default=asdict) + "\n")
    return path


def _ratio(ours: list[float], times: list[float]) -> float:
    return round(median(a / b for a, b in zip(ours, times, strict=True)), 3)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"model name\s*: (.+)", text)
    return found[1] if found else platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return finished.stdout.strip() or "unknown"
