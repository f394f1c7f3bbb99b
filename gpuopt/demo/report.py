"""The demo's output: a progress bar, tables, and a picture of the curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuopt.demo.train import Result


@contextmanager
def show_progress(console: Console, title: str, steps: int) -> Iterator[Callable[[], None]]:
    """Shows a bar if `console` is a terminal; yields a function that advances it by one step."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda: bar.advance(task)


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Prints a table with a row for each run."""
    table = Table()
    for heading in ("device", "optimizer"):
        table.add_column(heading, no_wrap=True)
    # Headings of two lines, so that the longest name of an optimizer fits into 80 columns.
    for heading in ("steps/s", "in opti-\nmizer", "train\naccuracy", "test\naccuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        _, train_accuracy, test_accuracy = result.accuracies[-1]
        table.add_row(
            str(result.device),
            result.optimizer,
            f"{len(result.losses) / result.seconds:,.0f}",
            f"{result.optimizer_seconds / result.seconds:.0%}",
            f"{train_accuracy:.1%}",
            f"{test_accuracy:.1%}",
        )
    console.print(table)


def print_workers(console: Console, result: Result) -> None:
    """Prints a table of the gradients and waiting time of each worker of a run."""
    table = Table(title=f"workers of {result.optimizer}")
    for heading in ("worker", "gradients\naccepted", "stale", "waited"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, figures in enumerate(result.workers):
        table.add_row(
            str(index), f"{figures.accepted:,}", f"{figures.stale:,}", f"{figures.waited_s:.2f} s"
        )
    console.print(table)


def save_curves(results: Sequence[Result], path: Path) -> bool:
    """Draws the curves of losses and accuracies into a file.

    Returns:
        False, and draws nothing, if matplotlib is not installed.

    Raises:
        OSError: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    # Not pyplot, which would choose a window system; a Figure draws with Agg.
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    # Even indices first: tab20 alternates strong and pale colors; over ten are needed.
    colors = cycle([colormaps["tab20"](index) for index in (*range(0, 20, 2), *range(1, 20, 2))])
    for result, color in zip(results, colors, strict=False):
        count = range(1, len(result.losses) + 1)
        losses.plot(count, result.losses, color=color, linewidth=0.8)
        steps, train, test = zip(*result.accuracies, strict=True)
        accuracies.plot(steps, train, color=color, linestyle=":")
        accuracies.plot(steps, test, color=color, marker=".", label=result.optimizer)
    losses.set(xlabel="step", ylabel="loss of the batch", yscale="log")
    accuracies.set(xlabel="step", ylabel="accuracy (dotted: training images)", ylim=(0.5, 1.01))
    # Beside the curves, which it would cover with the names of all optimizers.
    figure.legend(loc="outside right upper", fontsize="x-small", ncols=1 + len(results) // 25)
    figure.savefig(path, dpi=120)
    return True
