"""What the demo shows: a progress bar, a table, and a picture of the curves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gpuopt.demo.train import Result


@contextmanager
def progress_bar(console: Console, title: str, steps: int) -> Iterator[Callable[[], None]]:
    """Shows a bar, on a terminal, and yields what advances it by a step."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda: bar.advance(task)


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Prints a row for each run."""
    table = Table()
    for heading in ("device", "optimizer"):
        table.add_column(heading)
    for heading in ("steps/s", "in optimizer", "train accuracy", "test accuracy"):
        table.add_column(heading, justify="right")
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


def save_curves(results: Sequence[Result], path: Path) -> bool:
    """Draws losses and accuracies into a picture.

    Returns:
        False if matplotlib is not installed, and nothing was drawn.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, accuracies = figure.subplots(1, 2)
    for result in results:
        [line] = losses.plot(
            range(1, len(result.losses) + 1), result.losses, linewidth=0.8, label=result.optimizer
        )
        steps, train, test = zip(*result.accuracies, strict=True)
        color = line.get_color()
        accuracies.plot(steps, train, color=color, linestyle=":")
        accuracies.plot(steps, test, color=color, marker=".", label=result.optimizer)
    losses.set(xlabel="step", ylabel="loss of the batch", yscale="log")
    accuracies.set(xlabel="step", ylabel="accuracy (dotted: training images)", ylim=(0.5, 1.01))
    accuracies.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    return True
