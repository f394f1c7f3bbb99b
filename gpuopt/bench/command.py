"""The command `gpuopt bench`: its arguments, and what it does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gpuopt
from gpuopt.bench.compare import TOLERANCE, Verdict, compare_results, find_differences
from gpuopt.bench.jobs import JOBS
from gpuopt.bench.machine import describe_machine
from gpuopt.bench.measure import Bench, measure, prepare
from gpuopt.bench.page import write_page
from gpuopt.bench.results import Results, Run, read_results, write_results
from gpuopt.bench.workloads import DTYPES, Task, list_growing_tasks, list_tasks, why_not
from gpuopt.device import Device

if TYPE_CHECKING:
    from rich.console import Console

# Fewer have no deciles.
FEWEST_ROUNDS = 5
WIDTH_OF_FILES = 160


class Choice(NamedTuple):
    """A task, with an optimizer and a type."""

    task: Task
    job_name: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.task.name}/{self.job_name}/{self.dtype}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments; those of the device are the caller's."""
    parser.add_argument(
        "patterns",
        nargs="*",
        default=["*"],
        metavar="PATTERN",
        help="names of tasks, as in gpt2-124m or '*tensors'; --list shows them",
    )
    parser.add_argument("--list", action="store_true", help="list the tasks, and run none")
    parser.add_argument(
        "--growth",
        action="store_true",
        help="tasks that grow: in parameters, tensors, sparse rows and height of the table",
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=(*JOBS, "all"),
        default=["adam"],
        help="the optimizers to time",
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], help="dtypes of the weights"
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="how often each contender is timed, at most"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="after this time, a task begins no round"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all samples and figures to this file"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with plots and all samples"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        type=Path,
        metavar=("OLD", "NEW"),
        help="say what is SAME, FASTER, SLOWER or AMBIGUOUS since the file OLD, and end with "
        "status 1 if gpuopt is slower somewhere; with NEW, nothing is timed",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="by how much times may differ that are called the same",
    )


def why_refused(options: argparse.Namespace) -> str | None:
    """Returns what is wrong with the arguments, taken together, or None."""
    if options.rounds < FEWEST_ROUNDS:
        return f"--rounds must be at least {FEWEST_ROUNDS}, and is {options.rounds}"
    if not options.seconds >= 0:
        return f"--seconds must not be less than 0, and is {options.seconds}"
    if not 0 <= options.tolerance < 1:
        return f"--tolerance must be 0 or more, and less than 1, and is {options.tolerance}"
    if options.compare and len(options.compare) > 2:
        return f"--compare takes one file or two, and got {len(options.compare)}"
    for path in (options.json, options.html):
        if path and not path.parent.is_dir():
            return f"the folder of {str(path)!r} does not exist"
        if path and path.is_dir():
            return f"{str(path)!r} is a folder"
    if not options.compare and not list(choose(options)):
        return f"no task is named {' or '.join(options.patterns)}; --list shows them"
    return None


def choose(options: argparse.Namespace) -> Iterator[Choice]:
    """Yields what the arguments ask for."""
    jobs = list(JOBS) if "all" in options.optimizer else options.optimizer
    for task in list_growing_tasks() if options.growth else list_tasks():
        if any(fnmatch(task.name, pattern) for pattern in options.patterns):
            for job_name in jobs:
                for dtype in options.dtype:
                    yield Choice(task, job_name, dtype)


def run(options: argparse.Namespace, device: Device) -> int:
    """Runs the command with arguments that `why_refused` has no reason against.

    Returns:
        The exit status: 1 if gpuopt is slower than it was.

    Raises:
        OSError: a file cannot be written.
        ResultsError: a file to compare with cannot be read, or is none of results.
    """
    from rich.console import Console

    from gpuopt.bench.report import print_comparison, print_growth, print_reasons

    # Files and pipes have no width of their own.
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH_OF_FILES)
    if options.list:
        for task in list_growing_tasks() if options.growth else list_tasks():
            print(f"{task.name:<16}{task.description}")
        return 0
    # Before anything is timed, for that takes minutes.
    earlier = [read_results(path) for path in options.compare or ()]
    new = earlier[1] if len(earlier) == 2 else _run_all(console, options, device)
    print_growth(console, new.runs)
    print_reasons(console, new.not_run)
    if options.json:
        write_results(new, options.json)
    if options.html:
        write_page(new, options.html)
    if not earlier:
        return 0
    comparisons = compare_results(new, earlier[0], options.tolerance)
    print_comparison(console, comparisons, find_differences(new, earlier[0]))
    slower = [
        each
        for each in comparisons
        if each.verdict is Verdict.SLOWER and each.contender.startswith("gpuopt")
    ]
    return 1 if slower else 0


def _run_all(console: Console, options: argparse.Namespace, device: Device) -> Results:
    from gpuopt.bench.report import print_run

    bench = prepare(device)
    runs: dict[str, Run] = {}
    not_run: dict[str, str] = {}
    results = Results(
        gpuopt.__version__,
        f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        bench.name,
        describe_machine(),
        runs,
        not_run,
    )
    for choice in choose(options):
        reason = why_not(*choice, bench.count_free_bytes())
        if reason is not None:
            not_run[choice.name] = reason
            continue
        runs[choice.name] = _run_one(console, bench, choice, options)
        print_run(console, choice.name, runs[choice.name])
    return results


def _run_one(console: Console, bench: Bench, choice: Choice, options: argparse.Namespace) -> Run:
    from gpuopt.bench.report import show_progress

    with show_progress(console, choice.name, options.rounds) as on_round:
        return measure(
            bench, *choice, rounds=options.rounds, seconds=options.seconds, on_round=on_round
        )
