"""Draws the pictures of documentation pages from what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.catch_up import HEIGHTS
from bench.harness import ROOT
from gpuopt.bench.results import Run, list_costs, read_results

GROWTH = "growth.svg"
# Workloads of a picture's panels: (optimizer, size).
DENSE = re.compile(r"host_(\w+)_(16m|resnet50|1000x64)")
CATCH_UP_CONTENDERS = {
    "gpuopt": "catch_up=True",
    "LazyAdam": "LazyAdam",
    "all rows": "all rows",
    "torch SparseAdam": "torch's SparseAdam",
}
# Of contenders, by Okabe and Ito: told apart by all eyes.
_COLORS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#888888", "#CC79A7")
_IMAGES = ROOT / "docs" / "images"


class Curve(NamedTuple):
    """What grows.

    Attributes:
        title: What a step updates.
        axis: What grows.
    """

    title: str
    axis: str


CURVES = {
    "parameters": Curve("one tensor", "elements"),
    "tensors": Curve("tensors of 256 elements", "tensors"),
    "rows": Curve("rows of a table of 1,000,000 x 16", "rows of the gradient"),
    "height": Curve("8,192 rows of a table", "rows of the table"),
}


def name_steps(file: Path) -> str:
    """Returns the name of the picture of a machine's file of results."""
    return f"steps_on_{file.parent.name.replace('-', '_')}.svg"


def draw_steps(files: Sequence[Path]) -> None:
    """Draws the times of steps on each machine."""
    for file in files:
        _draw_steps(file)


def draw_growth(curves: Mapping[str, Sequence[Run]], file: Path) -> None:
    """Draws what a parameter, tensor or row costs as steps grow."""
    title = f"What a parameter, tensor or row costs as steps grow, from {file.name}"
    with _picture(GROWTH, title, (8.0, 6.4)) as figure:
        colors: dict[str, str] = {}
        for panel, (name, runs) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
            curve = CURVES[name]
            for contender in runs[0].contenders:
                color = colors.setdefault(contender, _COLORS[len(colors) % len(_COLORS)])
                costs = list_costs(runs, contender)
                panel.plot(*zip(*costs.items(), strict=True), ".-", color=color, linewidth=1.2)
            panel.set_xscale("log", base=2 if name == "parameters" else 10)
            panel.set_yscale("log")
            panel.set_xlabel(curve.axis)
            panel.set_ylabel(f"ns a {runs[0].per}")
            panel.set_title(curve.title, fontsize=9, loc="left")
            panel.grid(color="#DDDDDD", linewidth=0.5)
        handles = [
            panel.plot([], [], ".-", color=color, label=name)[0] for name, color in colors.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)


def draw_catch_up_times(runs: Mapping[str, Run]) -> None:
    """Draws the time of a step by the table's height."""
    curves = {}
    for who, title in CATCH_UP_CONTENDERS.items():
        found = (runs[f"catch_up_step_{key}"].contenders.get(who) for key in HEIGHTS)
        points = [
            (height, figures.usual.p10_ms)
            for height, figures in zip(HEIGHTS.values(), found, strict=True)
            if figures is not None
        ]
        if points:
            curves[title] = np.array(points)
    _draw_curves(
        "catch_up_times.svg", curves, "rows of the table", "milliseconds a step", logarithmic="xy"
    )


def draw_catch_up_training(curves: Mapping[str, np.ndarray]) -> None:
    """Draws how far tables are from where all rows are moved in each step."""
    label = "distance from all rows,\nas a part of their movement"
    _draw_curves("catch_up_training.svg", curves, "steps", label, logarithmic="y")


def _draw_steps(file: Path) -> None:
    results = read_results(file)
    sizes: dict[str, list[Run]] = {}
    for key, run in results.runs.items():
        if match := DENSE.fullmatch(key):
            sizes.setdefault(match[2], []).append(run)
    title = f"Milliseconds of a step at {results.commit}: the median, first and ninth decile"
    with _picture(name_steps(file), title, (8.0, 3.6)) as figure:
        panels = figure.subplots(1, len(sizes), squeeze=False)[0]
        colors: dict[str, str] = {}
        for panel, runs in zip(panels, sizes.values(), strict=True):
            _draw_panel(panel, runs, colors)
            panel.set_xlabel("milliseconds")
            what = runs[0].description.partition(" on ")[2]
            panel.set_title(what.replace(" of ", "\nof ", 1), fontsize=8, loc="left")
        lines = [
            panels[0].plot([], [], "o", color=color, markersize=4, label=name)[0]
            for name, color in colors.items()
        ]
        figure.legend(handles=lines, loc="outside lower center", ncols=3, frameon=False)


def _draw_panel(panel: Any, runs: Sequence[Run], colors: dict[str, str]) -> None:
    """Draws a group of points for each run, one below the other.

    Args:
        panel: Matplotlib's axes.
        runs: Of one size.
        colors: By contender; new ones are added.
    """
    from matplotlib.ticker import LogLocator

    for row, run in enumerate(runs):
        for place, (name, figures) in enumerate(run.contenders.items()):
            color, times = (
                colors.setdefault(name, _COLORS[len(colors) % len(_COLORS)]),
                figures.usual,
            )
            y = row + 0.7 * (place / len(run.contenders) - 0.5)
            panel.plot([times.p10_ms, times.p90_ms], [y, y], color=color, linewidth=1.0)
            panel.plot(times.median_ms, y, "o", color=color, markersize=4)
    names = [run.description.partition(" on ")[0] for run in runs]
    panel.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names])
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter("")
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.5)


def _draw_curves(
    file: str, curves: Mapping[str, np.ndarray], x: str, y: str, *, logarithmic: str
) -> None:
    with _picture(file, f"{y}, by {x}", (6.0, 3.4)) as figure:
        panel = figure.subplots()
        for (name, points), marker in zip(curves.items(), "osD^", strict=False):
            panel.plot(*points.T, label=name, marker=marker, markersize=4, linewidth=1.3)
        if "x" in logarithmic:
            panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.legend(frameon=False)


@contextmanager
def _picture(name: str, title: str, size: tuple[float, float]) -> Iterator[Any]:
    """Saves a figure that is drawn in the context as docs/images/NAME.

    Args:
        name: The file's name.
        title: What the picture shows, for its metadata.
        size: In inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9.0}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(_IMAGES / name, metadata={"Date": None, "Title": title})
    print(f"written: {(_IMAGES / name).relative_to(ROOT)}")
