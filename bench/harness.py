"""Times contenders in turn, in one process, and writes all samples to a file."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import gpuopt
from bench.targets import Target, judge
from gpuopt.bench.clock import time_ms
from gpuopt.bench.contenders import as_contender
from gpuopt.bench.machine import describe_commit, describe_machine, read_cpu_model
from gpuopt.bench.report import make_console, print_run
from gpuopt.bench.results import Copies, Results, Run, make_figures, read_results
from gpuopt.bench.results import write_results as write_file
from gpuopt.bench.sampling import take_turns
from gpuopt.bench.workloads import Workload, make_run

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_WARM_UP_ROUNDS = 3


class Offer(NamedTuple):
    """A workload that has not been made yet, as it takes time and memory.

    Attributes:
        name: The workload's name.
        make: Makes it.
        targets: Of its measurements.
        why_not: Returns why it does not fit into so much memory, or None.
        is_slow: Whether it is left out of a run of all workloads: it takes minutes.
    """

    name: str
    make: Callable[[], Workload]
    targets: Sequence[Target] = ()
    why_not: Callable[[int | None], str | None] = lambda _: None
    is_slow: bool = False


def make_parser(
    prog: str, description: str | None, rounds: int | None = None, only: str | None = None
) -> argparse.ArgumentParser:
    """Makes the parser of a command that measures and writes results.

    Args:
        prog: The command.
        description: What it does.
        rounds: How many there are by default, if it has rounds.
        only: An example of a pattern of names, if it takes one.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=_two_or_more, default=rounds, help="samples of each contender"
        )
    if only is not None:
        parser.add_argument(
            "--only", default="*", metavar="PATTERN", help=f"what is measured, as in {only}"
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


def take_samples(workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Returns each contender's times in milliseconds, one for each round."""
    samples: dict[str, list[float]] = {name: [] for name in workload.contenders}

    def sample(name: str) -> None:
        contender = as_contender(workload.contenders[name])
        contender.prepare()
        samples[name].append(time_ms(contender.step))
        workload.settle()

    take_turns(samples, sample, _WARM_UP_ROUNDS + rounds)
    return {name: times[_WARM_UP_ROUNDS:] for name, times in samples.items()}


def report(
    name: str,
    workload: Workload,
    samples: Mapping[str, Sequence[float]],
    targets: Sequence[Target] = (),
    copies: Copies | None = None,
) -> Run:
    """Prints a workload's times, and whether they meet targets; returns its results.

    Args:
        name: The workload's.
        workload: What was timed.
        samples: What `take_samples` returned.
        targets: Of this workload.
        copies: For comparison.
    """
    contenders = {}
    for each, times in samples.items():
        kept = {"peak_extra_bytes": workload.peak_extra_bytes.get(each)}
        if (step := workload.contenders.get(each)) is not None:
            kept["state_bytes"] = as_contender(step).count_state_bytes()
        copy_gb_per_s = copies and copies.gb_per_s
        contenders[each] = make_figures(
            {"step": times}, workload.bytes_moved, copy_gb_per_s, **kept
        )
    run = make_run(workload, contenders, copies)
    run.targets.extend(str(judge(target, run)) for target in targets)
    console = make_console()
    print_run(console, name, run)
    for line in run.targets:
        console.print(line, highlight=False)
    return run


def write_results(
    runs: Mapping[str, Run],
    name: str | None = None,
    output: Path = RESULTS,
    *,
    device: str = "cpu",
    machine: Mapping[str, object] | None = None,
    commit: str | None = None,
    not_run: Mapping[str, str] | None = None,
) -> Path:
    """Writes a file named after the machine, the date and the commit; returns its path.

    If the file exists, its other runs are kept.

    Args:
        runs: By the names of workloads.
        name: The machine's name; by default its CPU's.
        output: The folder that has a folder for each machine.
        device: "cpu", or a GPU's name.
        machine: Describes it; by default, `describe_machine` does.
        commit: What was measured; by default, asks git.
        not_run: What could not be run, with reasons.
    """
    commit = commit or describe_commit(ROOT)
    now = datetime.now(UTC)
    results = Results(
        gpuopt.__version__,
        f"{now:%Y-%m-%d %H:%M}",
        device,
        machine or describe_machine(),
        dict(runs),
        dict(not_run or {}),
        commit,
    )
    path = name_file(name or f"{read_cpu_model()} {os.cpu_count()} cores", commit, output)
    if path.exists():
        earlier = read_results(path)
        both = {**earlier.runs, **runs}
        reasons = {**earlier.not_run, **results.not_run}
        left = {each: why for each, why in reasons.items() if each not in both}
        results = replace(results, runs=both, not_run=left)
    write_file(results, path)
    return path


def name_file(name: str, commit: str, output: Path = RESULTS) -> Path:
    """Names today's file of results of a machine, and makes its folder."""
    folder = output / re.sub(r"[^a-z0-9]+", "-", name.lower())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{datetime.now(UTC):%Y-%m-%d}-{commit}.json"
