"""The output of benchmarks: a progress bar, and tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuopt.bench.columns import Column, list_columns
from gpuopt.bench.compare import Comparison, Interval, Verdict
from gpuopt.bench.results import Run, describe_run, list_curves, three_digits

_COLORS = {
    Verdict.SAME: "",
    Verdict.FASTER: "green",
    Verdict.SLOWER: "bold red",
    Verdict.AMBIGUOUS: "yellow",
}

_WIDTH_OF_FILES, _WIDEST = 160, 1000
# Columns, from those that are the first to go on.
_MAY_BE_LEFT_OUT = ("deciles", "memory", "bandwidth")


def make_console() -> Console:
    """Makes a console for the standard output; files and pipes have no width of their own."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)


@contextmanager
def show_progress(console: Console, title: str, rounds: int) -> Iterator[Callable[[], None]]:
    """Shows a bar if `console` is a terminal; yields a function that advances it by one round."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(escape(title), total=rounds)
        yield lambda: bar.advance(task)


def print_run(console: Console, name: str, run: Run) -> None:
    """Prints a table of one task's contenders, and what makes its figures doubtful.

    Where the console is too narrow, deciles are left out, then memory, and then bandwidth. Where it
    still is, names are broken, and figures are not.
    """
    unlimited = console.options.update(max_width=_WIDEST)
    columns = list_columns(run)
    table = _make_table(name, run, columns)
    for part in _MAY_BE_LEFT_OUT:
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
        columns = [each for each in columns if each.part != part]
        table = _make_table(name, run, columns)
    console.print(table)
    for note in run.notes:
        _print_line(console, f"  {note}")


def _make_table(name: str, run: Run, columns: Sequence[Column]) -> Table:
    table = _new_table(f"{name}: {describe_run(name, run)}")
    table.add_column("")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for contender, figures in run.contenders.items():
        table.add_row(contender, *(column.write(figures) for column in columns))
    return table


def _new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def print_growth(console: Console, runs: Mapping[str, Run]) -> None:
    """Prints a table of each curve: what a parameter, tensor or row costs as steps grow."""
    for name, points in list_curves(runs).items():
        table = _new_table(f"growth: {name}, ns a {points[0].per}, warm")
        table.collapse_padding = True
        contenders = dict.fromkeys(each for run in points for each in run.contenders)
        for heading in (name.partition("/")[0], *contenders):
            # One word a line: on 80 columns, there is room for seven contenders.
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        for run in points:
            costs = (three_digits(run.cost_ns(run.contenders.get(each))) for each in contenders)
            table.add_row(f"{run.at:,}", *costs)
        console.print(table)


def print_comparison(
    console: Console,
    comparisons: Sequence[Comparison],
    differences: Sequence[str],
    missing: Sequence[str] = (),
    advice: Sequence[str] = (),
) -> None:
    """Prints a table of verdicts if there are any, what is missing, and how the machines differ.

    Args:
        console: Where to.
        comparisons: The table's rows.
        differences: Those of the machines.
        missing: What one of the results lacks.
        advice: Why verdicts are AMBIGUOUS, and what would settle them.
    """
    table = _new_table("compared with earlier results")
    for heading in ("", "contender"):
        table.add_column(heading, overflow="fold")
    table.add_column("caches", no_wrap=True)
    for heading in ("new / old", "between"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for each in comparisons:
        color = _COLORS[each.verdict]
        table.add_row(
            each.run,
            each.contender,
            each.caches,
            f"{each.ratio:.3f}",
            _format_interval(each.interval),
            f"[{color}]{each.verdict}[/]" if color else str(each.verdict),
        )
    if comparisons:
        console.print(table)
    for line in (*advice, *missing):
        _print_line(console, f"  {line}")
    for difference in differences:
        _print_line(console, f"  not the same: {difference}")


def print_reasons(console: Console, not_run: Mapping[str, str]) -> None:
    """Prints what was not run, and why."""
    for name, reason in not_run.items():
        _print_line(console, f"{name} was not run: {reason}")


def _print_line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def _format_interval(interval: Interval) -> str:
    if interval.low == 0 or interval.high == math.inf:
        return "too few samples"
    return f"{interval.low:.3f} - {interval.high:.3f}"
