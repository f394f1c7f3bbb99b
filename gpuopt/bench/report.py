"""The output of `gpuopt bench`: a progress bar, and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuopt.bench.compare import Comparison, Interval, Verdict
from gpuopt.bench.results import Figures, Run, Times, name_optimizer

_COLORS = {
    Verdict.SAME: "",
    Verdict.FASTER: "green",
    Verdict.SLOWER: "bold red",
    Verdict.AMBIGUOUS: "yellow",
}


_WIDEST = 1000


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

    Deciles are left out where the console is too narrow for them.
    """
    table = _make_table(name, run, with_deciles=True)
    unlimited = console.options.update(max_width=_WIDEST)
    if console.measure(table, options=unlimited).maximum > console.width:
        table = _make_table(name, run, with_deciles=False)
    console.print(table)
    for contender, reason in run.left_out.items():
        _print_line(console, f"  without {contender}: {reason}")
    for warning in run.warnings:
        _print_line(console, f"  doubtful: {warning}")


def _make_table(name: str, run: Run, *, with_deciles: bool) -> Table:
    on_gpu = run.counts_launches
    deciles = ("p10", "p90") if with_deciles else ()
    table = _new_table(f"{name}: {name_optimizer(name, run)}, {run.description}")
    table.add_column("", no_wrap=True)
    for heading in (
        *("warm\nms", *deciles, "gpuopt\n/ its", "cold\nms", *deciles),
        *("GB/s", "of\ncopy", "state\nMB", "peak\nMB"),
        *(("launches", "waits") if on_gpu else ()),
        *((f"ns a\n{run.per}",) if run.per else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = run.contenders["gpuopt"].warm.median_ms
    for contender, figures in run.contenders.items():
        table.add_row(
            contender,
            *_format_times(figures.warm, with_deciles),
            f"{ours / figures.warm.median_ms:.2f}",
            *_format_times(figures.cold, with_deciles),
            f"{figures.gb_per_s:.1f}",
            f"{figures.share_of_copy:.0%}",
            _format_megabytes(figures.state_bytes),
            _format_megabytes(figures.peak_extra_bytes),
            *(_format_calls(figures) if on_gpu else ()),
            *((_format_cost(figures, run),) if run.units else ()),
        )
    return table


def _new_table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)


def print_growth(console: Console, runs: Mapping[str, Run]) -> None:
    """Prints the cost of a parameter, tensor or row for all tasks that grow."""
    growing = {name: run for name, run in runs.items() if run.units}
    if not growing:
        return
    contenders = list(dict.fromkeys(each for run in growing.values() for each in run.contenders))
    table = _new_table("nanoseconds, with warm caches")
    for heading in ("", "for each", *contenders):
        table.add_column(heading, justify="right" if heading in contenders else "left")
    for name, run in growing.items():
        found = (run.contenders.get(each) for each in contenders)
        table.add_row(name, run.per, *(_format_cost(figures, run) for figures in found))
    console.print(table)


def print_comparison(
    console: Console,
    comparisons: Sequence[Comparison],
    differences: Sequence[str],
    missing: Sequence[str] = (),
) -> None:
    """Prints a table of verdicts if there are any, what is missing, and how the machines differ."""
    table = _new_table("compared with earlier results")
    for heading in ("", "contender", "caches", "new / old", "between", ""):
        table.add_column(
            heading, justify="right" if heading in ("new / old", "between") else "left"
        )
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
    for each_missing in missing:
        _print_line(console, f"  {each_missing}")
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


def _format_cost(figures: Figures | None, run: Run) -> str:
    if figures is None or not run.units:
        return ""
    return f"{1e6 * figures.warm.median_ms / run.units:.3g}"


def _format_interval(interval: Interval) -> str:
    if interval.low == 0 or interval.high == math.inf:
        return "too few samples"
    return f"{interval.low:.3f} - {interval.high:.3f}"


def _format_calls(figures: Figures) -> list[str]:
    return ["" if count is None else str(count) for count in (figures.launches, figures.waits)]
