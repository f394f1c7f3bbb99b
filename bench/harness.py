"""Times contenders in turn, in one process, and writes all samples to a file."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from rich.table import Table

from bench.targets import Target, judge
from gpuopt.atomic_file import replace_file
from gpuopt.bench.contenders import Contender
from gpuopt.bench.machine import describe_commit, describe_machine, read_cpu_model
from gpuopt.bench.report import make_console
from gpuopt.bench.results import find_deciles
from gpuopt.bench.sampling import take_turns
from gpuopt.bench.workloads import NUMPY_ALONE

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
Step = Callable[[], object]
_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Workload:
    """A task that several contenders are timed on.

    Attributes:
        name: The workload's name.
        description: The task, in a sentence.
        bytes_moved: How many bytes a step must at least read and write; None where memory is not
            the limit.
        contenders: By name, functions that do one step; gpuopt's is called "gpuopt".
        operations: How many operations a step has, where the cost of each one matters.
        settle: Called after each step and not timed: waits for background work.
        peak_extra_bytes: By contender, how much memory a step needs at its peak, where measured.
        left_out: Contenders that take no part, with reasons.
    """

    name: str
    description: str
    bytes_moved: int | None
    contenders: Mapping[str, Step]
    operations: int | None = None
    settle: Step = lambda: None
    peak_extra_bytes: Mapping[str, int] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


class Offer(NamedTuple):
    """A workload that has not been made yet, as it takes time and memory.

    Attributes:
        name: The workload's name.
        make: Makes it.
        targets: Of its measurements.
        needed_bytes: How much of a GPU's memory it needs.
    """

    name: str
    make: Callable[[], Workload]
    targets: Sequence[Target] = ()
    needed_bytes: int = 0


@dataclass(frozen=True)
class Timing:
    """One contender's samples, in milliseconds, and their statistics.

    Attributes:
        ratio: The median over all rounds of gpuopt's time divided by this contender's time.
        extra_ms: The median over all rounds of gpuopt's time less this contender's.
        gb_per_s: `bytes_moved` divided by the median time, in 10^9 bytes a second.
        share_of_copy: `gb_per_s` divided by the measured bandwidth of a copy.
        us_per_operation: The median time divided by `operations`, in microseconds.
        numpy_ratio: As `ratio`, for gpuopt without compiled rules, if that was a contender.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float
    extra_ms: float
    gb_per_s: float | None
    share_of_copy: float | None
    us_per_operation: float | None
    numpy_ratio: float | None
    samples_ms: list[float]


def make_parser(prog: str, description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Makes the parser of a command that measures and writes results."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--rounds", type=_two_or_more, default=rounds, help="number of samples of each contender"
    )
    parser.add_argument(
        "--no-results", action="store_true", help="print the results, but do not write a file"
    )
    return parser


def _two_or_more(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, and is {number}")
    return number


def report(
    workload: Workload,
    samples: Mapping[str, list[float]],
    targets: Sequence[Target] = (),
    copy_bytes_per_second: float = math.inf,
) -> dict[str, Any]:
    """Prints a workload's times, and whether they meet targets; returns its entry in the results.

    Args:
        workload: What was timed.
        samples: What `take_samples` returned.
        targets: Of this workload.
        copy_bytes_per_second: The bandwidth of a copy, for comparison.
    """
    timings = summarize_all(workload, samples, copy_bytes_per_second)
    verdicts = [judge(target, timings) for target in targets]
    headings = ("", "median ms", "p10", "p90", "gpuopt / its", "numpy / its")
    table = Table(*headings, "GB/s", "of copy", "us each", title=workload.description)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, timing in timings.items():
        table.add_row(
            name,
            *(f"{ms:.3f}" for ms in (timing.median_ms, timing.p10_ms, timing.p90_ms)),
            f"{timing.ratio:.2f}",
            "" if timing.numpy_ratio is None else f"{timing.numpy_ratio:.2f}",
            "" if timing.gb_per_s is None else f"{timing.gb_per_s:.1f}",
            "" if timing.share_of_copy is None else f"{timing.share_of_copy:.0%}",
            "" if timing.us_per_operation is None else f"{timing.us_per_operation:.2f}",
        )
    console = make_console()
    console.print(table)
    for name, peak in (workload.peak_extra_bytes or {}).items():
        console.print(f"{name} adds {peak / 2**20:.0f} MiB at its peak", highlight=False)
    for verdict in verdicts:
        console.print(str(verdict), highlight=False)
    return {
        "description": workload.description,
        "bytes_moved": workload.bytes_moved,
        "operations": workload.operations,
        "contenders": timings,
        "targets": verdicts,
        "peak_extra_bytes": workload.peak_extra_bytes,
    }


def take_samples(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Returns each contender's times in milliseconds, one for each round."""
    samples: dict[str, list[float]] = {name: [] for name in workload.contenders}

    def sample(name: str) -> None:
        step = workload.contenders[name]
        if isinstance(step, Contender):
            step.prepare()
        started = perf_counter()
        step()
        samples[name].append(1e3 * (perf_counter() - started))
        workload.settle()

    take_turns(samples, sample, _WARM_UP_ROUNDS + rounds)
    return {name: times[_WARM_UP_ROUNDS:] for name, times in samples.items()}


def summarize_all(
    workload: Workload, samples: Mapping[str, list[float]], copy_bytes_per_second: float
) -> dict[str, Timing]:
    """Computes the statistics of what `take_samples` returned."""
    return {
        name: summarize(
            workload, times, samples["gpuopt"], samples.get(NUMPY_ALONE), copy_bytes_per_second
        )
        for name, times in samples.items()
    }


def summarize(
    workload: Workload,
    times: list[float],
    ours: list[float],
    ours_numpy: list[float] | None,
    copy_bytes_per_second: float,
) -> Timing:
    """Computes a contender's statistics; `ours` are gpuopt's samples of the same rounds."""
    middle, p10, p90 = find_deciles(times)
    seconds = 1e-3 * middle
    speed = None if workload.bytes_moved is None else workload.bytes_moved / seconds
    each = None if workload.operations is None else seconds / workload.operations
    return Timing(
        median_ms=round(middle, 4),
        p10_ms=round(p10, 4),
        p90_ms=round(p90, 4),
        ratio=_median_ratio(ours, times),
        extra_ms=round(median(a - b for a, b in zip(ours, times, strict=True)), 4),
        gb_per_s=None if speed is None else round(speed / 1e9, 2),
        share_of_copy=None if speed is None else round(speed / copy_bytes_per_second, 3),
        us_per_operation=None if each is None else round(1e6 * each, 2),
        numpy_ratio=None if ours_numpy is None else _median_ratio(ours_numpy, times),
        samples_ms=[round(time, 4) for time in times],
    )


def write_results(
    results: Mapping[str, Any], name: str | None = None, output: Path = RESULTS
) -> Path:
    """Writes a file named after the machine, the date and the commit; returns its path.

    If the file exists, its other workloads are kept.

    Args:
        results: The content of the file. "machine" and "commit" are added unless given.
        name: The machine's name; by default its CPU's.
        output: The folder that has a folder for each machine.
    """
    described = {"machine": describe_machine(), "commit": describe_commit(ROOT), **results}
    name = name or f"{read_cpu_model()} {os.cpu_count()} cores"
    folder = output / re.sub(r"[^a-z0-9]+", "-", name.lower())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.now(UTC):%Y-%m-%d}-{described['commit']}.json"
    if path.exists():
        earlier = json.loads(path.read_text())
        described["workloads"] = earlier["workloads"] | described["workloads"]
    replace_file(path, f"{json.dumps(described, indent=1, default=asdict)}\n".encode())
    return path


def _median_ratio(ours: list[float], times: list[float]) -> float:
    return round(median(a / b for a, b in zip(ours, times, strict=True)), 3)
