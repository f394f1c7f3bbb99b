"""The command `gpuopt bench`: its arguments, and what it does."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, NamedTuple

import gpuopt
from gpuopt.bench.compare import (
    TOLERANCE,
    Verdict,
    compare_results,
    find_differences,
    find_missing,
    list_advice,
)
from gpuopt.bench.contenders import ContenderError, StepMaker
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
        metavar="PATTERN",
        help="names of tasks, as in gpt2-124m or '*tensors'; --list shows them; all by default",
    )
    parser.add_argument(
        "--shapes",
        type=_parse_shapes,
        metavar="SHAPES",
        help="a task of your own: float tensors of these shapes, as in 1024x1024,4096; without a "
        "PATTERN, no other",
    )
    parser.add_argument(
        "--contender",
        nargs="+",
        type=_import_contender,
        default=[],
        metavar="MODULE:FUNCTION",
        help="time your own optimizer beside the others: FUNCTION(weights, gradients) returns a "
        "function that makes a step",
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
        "status 1 if gpuopt is slower somewhere, or with 2 if nothing of gpuopt's is in both; with "
        "NEW, nothing is timed",
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
        if path and (reason := _why_unwritable(path)) is not None:
            return reason
    if options.json and options.html and options.json.resolve() == options.html.resolve():
        return f"--json and --html name the same file, {str(options.json)!r}"
    if not options.compare and not list(choose(options)):
        return f"no task is named {' or '.join(options.patterns)}; --list shows them"
    return None


def choose(options: argparse.Namespace) -> Iterator[Choice]:
    """Yields what the arguments ask for."""
    jobs = list(JOBS) if "all" in options.optimizer else options.optimizer
    for task in choose_tasks(options):
        for job_name in jobs:
            for dtype in options.dtype:
                yield Choice(task, job_name, dtype)


def choose_tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Yields the task of the user's own shapes, and those whose names match the patterns."""
    patterns = options.patterns
    if options.shapes:
        yield options.shapes
    elif not patterns:
        patterns = ["*"]
    for task in list_growing_tasks() if options.growth else list_tasks():
        if any(fnmatch(task.name, pattern) for pattern in patterns):
            yield task


def run(options: argparse.Namespace, device: Device) -> int:
    """Runs the command with arguments that `why_refused` has no reason against.

    Returns:
        The exit status: 1 if gpuopt is slower than it was, 2 if this cannot be said.

    Raises:
        KeyboardInterrupt: Ctrl-C; the files that were asked for have what was measured until then.
        ContenderError: a user's own contender has failed; the same holds for files.
        OSError: a file cannot be written.
        ResultsError: a file to compare with cannot be read, or is none of results.
    """
    from gpuopt.bench.report import make_console, print_comparison, print_growth, print_reasons

    console = make_console()
    if options.list:
        for task in choose_tasks(options):
            print(f"{task.name:<16}{task.description}")
        return 0
    # Before anything is timed, for that takes minutes.
    earlier = [read_results(path) for path in options.compare or ()]
    if len(earlier) == 2:
        new = earlier[1]
    else:
        bench = prepare(device)
        new = _begin(bench)
        try:
            _run_all(console, bench, options, new)
        except (KeyboardInterrupt, ContenderError):
            _keep(new, options)
            raise
    print_growth(console, new.runs)
    print_reasons(console, new.not_run)
    _write(new, options)
    if not earlier:
        return 0
    comparisons = compare_results(new, earlier[0], options.tolerance)
    differences, missing = find_differences(new, earlier[0]), find_missing(new, earlier[0])
    advice = list_advice(comparisons, new, earlier[0])
    print_comparison(console, comparisons, differences, missing, advice)
    ours = [each.verdict for each in comparisons if each.contender.startswith("gpuopt")]
    if not ours:
        print("gpuopt bench: no run of gpuopt is in both results to compare", file=sys.stderr)
        return 2
    return 1 if Verdict.SLOWER in ours else 0


def _why_unwritable(path: Path) -> str | None:
    if path.exists() and not path.is_file():
        return f"{str(path)!r} is no regular file"
    try:  # as it will be written: beside the file, which is then replaced
        with TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return f"{str(path)!r} cannot be written: {error.strerror}"


def _begin(bench: Bench) -> Results:
    """Returns results without runs."""
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    return Results(gpuopt.__version__, date, bench.name, describe_machine(), {}, {})


def _write(results: Results, options: argparse.Namespace) -> None:
    if options.json:
        write_results(results, options.json)
    if options.html:
        write_page(results, options.html)


def _keep(results: Results, options: argparse.Namespace) -> None:
    """Writes the runs that were measured before the end, and says so."""
    files = [str(path) for path in (options.json, options.html) if path]
    if results.runs and files:
        _write(results, options)
        runs = f"{len(results.runs)} of {len(list(choose(options)))} runs"
        print(f"gpuopt bench: stopped; {runs} are in {' and '.join(files)}", file=sys.stderr)


def _run_all(console: Console, bench: Bench, options: argparse.Namespace, results: Results) -> None:
    """Adds each run to `results` when it is over."""
    from gpuopt.bench.report import print_run

    for choice in choose(options):
        reason = why_not(*choice, bench.count_free_bytes(), len(options.contender))
        if reason is not None:
            results.not_run[choice.name] = reason
            continue
        results.runs[choice.name] = _run_one(console, bench, choice, options)
        print_run(console, choice.name, results.runs[choice.name])


def _run_one(console: Console, bench: Bench, choice: Choice, options: argparse.Namespace) -> Run:
    from gpuopt.bench.report import show_progress

    with show_progress(console, choice.name, options.rounds) as on_round:
        return measure(
            bench,
            *choice,
            rounds=options.rounds,
            seconds=options.seconds,
            on_round=on_round,
            users=options.contender,
        )


def _import_contender(text: str) -> tuple[str, StepMaker]:
    """Imports MODULE:FUNCTION, from the current folder or from what is installed."""
    module_name, _, name = text.partition(":")
    if not (module_name and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MODULE:FUNCTION")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        maker = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be imported: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(f"{text!r} cannot be imported: {reason}") from error
    if not callable(maker):
        raise argparse.ArgumentTypeError(f"{text!r} is no function, but {type(maker).__name__}")
    return text, maker


def _parse_shapes(text: str) -> Task:
    """Reads shapes, as "1024x1024,4096"."""
    shapes = [part.split("x") for part in text.split(",")]
    if not all(side.isdecimal() and int(side) > 0 for shape in shapes for side in shape):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be shapes of sides above 0, as in 1024x1024,4096"
        )
    return Task(text, "your own shapes", [tuple(map(int, shape)) for shape in shapes])
