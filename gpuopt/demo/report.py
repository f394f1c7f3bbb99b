"""The demo's output: a progress bar, tables, and a picture of the curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuopt.demo.train import Result

if TYPE_CHECKING:  # it takes long to import, and may be missing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    for heading in ("optimizer's\npart of a step", "train\naccuracy", "test\naccuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        _, train_accuracy, test_accuracy = result.accuracies[-1]
        ms = 1000 / len(result.losses)
        table.add_row(
            str(result.device),
            result.optimizer,
            f"{result.optimizer_seconds * ms:.2f} of {result.seconds * ms:.2f} ms",
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


# More curves than this have a panel each.
_MOST_TOGETHER = 8
_PANELS_IN_A_ROW = 6
# Curves of losses have the means of about so many parts of a run.
_MEANS = 40
# Room for a label beside a curve's end, as a part of the height.
_LABEL_HEIGHT = 0.05


def save_curves(results: Sequence[Result], path: Path) -> bool:
    """Draws the curves of losses and accuracies into a file.

    Up to 8 runs are drawn together, with their names at the ends of their curves. Of more runs,
    each has a panel with its accuracy, beside those of the others in grey.

    Returns:
        False, and draws nothing, if matplotlib is not installed.

    Raises:
        OSError: the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        return False
    # Not pyplot, which would choose a window system; a Figure draws with Agg.
    from matplotlib.figure import Figure

    if len(results) <= _MOST_TOGETHER:
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        _draw_together(figure, results)
    else:
        rows = -(-len(results) // _PANELS_IN_A_ROW)
        figure = Figure(figsize=(12, 1.7 * rows + 0.6), layout="constrained")
        _draw_apart(figure, results)
    device, steps = results[0].device, len(results[0].losses)
    figure.suptitle(f"gpuopt's demo: handwritten digits, {steps:,} steps on {device}")
    figure.savefig(path, dpi=120)
    return True


def _draw_together(figure: Figure, results: Sequence[Result]) -> None:
    losses, accuracies = figure.subplots(1, 2)
    for axes in (losses, accuracies):
        axes.spines[["top", "right"]].set_visible(False)
    for number, result in enumerate(results):
        color = f"C{number}"
        losses.plot(*_means(result.losses), color=color)
        steps, train, test = zip(*result.accuracies, strict=True)
        accuracies.plot(steps, train, color=color, linewidth=0.8, linestyle=":")
        accuracies.plot(steps, test, color=color, marker=".")
    losses.set(xlabel="step", ylabel="mean loss", yscale="log")
    accuracies.set(xlabel="step", ylabel="accuracy (dotted: training images)")
    accuracies.set_ylim(_lowest(results), 1.002)
    names = [result.optimizer for result in results]
    _label_ends(losses, names, [_means(result.losses)[1][-1] for result in results])
    _label_ends(accuracies, names, [result.accuracies[-1][2] for result in results])


def _label_ends(axes: Axes, names: Sequence[str], ends: Sequence[float]) -> None:
    """Writes names beside the ends of curves; names that would overlap are moved apart."""
    axes.get_ylim()  # sets the limits by the curves, which else happens when they are drawn
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [(float(to_axes.transform((1, end))[1]), number) for number, end in enumerate(ends)]
    places.sort()
    for _ in range(100):
        for at, (lower, upper) in enumerate(pairwise(places)):
            overlap = lower[0] + _LABEL_HEIGHT - upper[0]
            if overlap > 0:
                places[at] = lower[0] - overlap / 2, lower[1]
                places[at + 1] = upper[0] + overlap / 2, upper[1]
    for place, number in places:
        axes.text(
            *(1.02, place, names[number]),
            color=f"C{number}",
            transform=axes.transAxes,
            verticalalignment="center",
        )


def _draw_apart(figure: Figure, results: Sequence[Result]) -> None:
    rows = -(-len(results) // _PANELS_IN_A_ROW)
    panels = figure.subplots(rows, _PANELS_IN_A_ROW, sharex=True, sharey=True).flat
    curves = [[*zip(*result.accuracies, strict=True)] for result in results]
    for axes, result, (steps, _, test) in zip(panels, results, curves, strict=False):
        for other_steps, _, other in curves:
            axes.plot(other_steps, other, color="0.85", linewidth=0.6)
        axes.plot(steps, test, color="C0")
        axes.set_title(result.optimizer, fontsize="small")
        axes.set_ylim(_lowest(results), 1.002)
    for axes in figure.axes[len(results) :]:
        axes.set_visible(False)
    figure.supxlabel("step")
    figure.supylabel("accuracy on test images (grey: the others)")


def _lowest(results: Sequence[Result]) -> float:
    """Returns where an axis of accuracies begins: 0.9, or lower if a run ends below."""
    return min(0.9, *(math.floor(10 * result.accuracies[-1][2]) / 10 for result in results))


def _means(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns the middle steps, and the means, of parts of equal length."""
    size = max(1, len(losses) // _MEANS)
    begins = range(0, len(losses) - size + 1, size)
    return [begin + (size + 1) / 2 for begin in begins], [
        sum(losses[begin : begin + size]) / size for begin in begins
    ]
