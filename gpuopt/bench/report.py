"""The output of `gpuopt bench`: a progress bar, and tables."""

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

from gpuopt.bench.compare import Comparison, Interval, Verdict
from gpuopt.bench.results import Figures, Run, Times, list_curves, name_optimizer, three_digits

_COLORS = {
    Verdict.SAME: "",
    Verdict.FASTER: "green",
    Verdict.SLOWER: "bold red",
    Verdict.AMBIGUOUS: "yellow",
}

_WIDTH_OF_FILES, _WIDEST = 160, 1000
# The columns that are the first to go are the last here.
_MAY_BE_LEFT_OUT = ("bandwidth", "memory", "deciles")


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
    shown = list(_MAY_BE_LEFT_OUT)
    table = _make_table(name, run, shown)
    while shown and console.measure(table, options=unlimited).maximum > console.width:
        shown.pop()
        table = _make_table(name, run, shown)
    console.print(table)
    for note in run.notes:
        _print_line(console, f"  {note}")


def _make_table(name: str, run: Run, shown: Sequence[str]) -> Table:
    on_gpu = run.counts_launches
    with_deciles = "deciles" in shown
    deciles = ("p10", "p90") if with_deciles else ()
    table = _new_table(f"{name}: {name_optimizer(name, run)}, {run.description}")
    table.add_column("")
    for heading in (
        *("warm\nms", *deciles, "gpuopt\n/ its", "cold\nms", *deciles),
        *(("GB/s", "of\ncopy") if "bandwidth" in shown else ()),
        *(("state\nMB", "peak\nMB") if "memory" in shown else ()),
        *(("launches", "waits") if on_gpu else ()),
        *((f"ns a\n{run.per}",) if run.per else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = run.contenders["gpuopt"].warm.median_ms
    for contender, figures in run.contenders.items():
        bandwidth = (f"{figures.gb_per_s:.1f}", f"{figures.share_of_copy:.0%}")
        memory = map(_format_megabytes, (figures.state_bytes, figures.peak_extra_bytes))
        table.add_row(
            contender,
            *_format_times(figures.warm, with_deciles),
            f"{ours / figures.warm.median_ms:.2f}",
            *_format_times(figures.cold, with_deciles),
            *(bandwidth if "bandwidth" in shown else ()),
            *(memory if "memory" in shown else ()),
            *(_format_calls(figures) if on_gpu else ()),
            *((three_digits(run.cost_ns(contender)),) if run.units else ()),
        )
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
            costs = (three_digits(run.cost_ns(each)) for each in contenders)
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
        advice: How AMBIGUOUS would become another verdict.
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


def _format_times(times: Times, with_deciles: bool) -> list[str]:
    deciles = (times.p10_ms, times.p90_ms) if with_deciles else ()
    return [f"{ms:.4g}" for ms in (times.median_ms, *deciles)]


def _format_megabytes(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.1f}"


def _format_interval(interval: Interval) -> str:
    if interval.low == 0 or interval.high == math.inf:
        return "too few samples"
    return f"{interval.low:.3f} - {interval.high:.3f}"


def _format_calls(figures: Figures) -> list[str]:
    return ["" if count is None else str(count) for count in (figures.launches, figures.waits)]
