"""Draws the pictures of docs/optimizers.md, and says in each what it shows.

.venv/bin/python tests/support/gallery.py
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import surfaces
from optimizer_page import entries
from surfaces import Surface

from gpuopt.demo.settings import NAMES, TUNED, UNTUNED_RATE
from gpuopt.demo.train import DEFAULT_STEPS, train
from gpuopt.device import Device

COMMAND = "make gallery"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PATHS = IMAGES / "paths"
DIGITS = "digits"
COLUMNS = 2
# Okabe & Ito's, which the colour-blind can tell apart, too; brown for their yellow.
COLORS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#8B4513"]
DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5))]
MARKERS = "osD^vPX*"
LOSSES_IN_A_MEAN = 50
# Of a surface's frame, for a path that reaches its border.
MARGIN = 0.05


class Curve(NamedTuple):
    """What a picture shows of one optimizer.

    Attributes:
        name: Of the optimizer, less "Optimizer".
        rate: Its learning rate.
        points: [n, 2], in the order in which they are joined.
        end: What the picture says of its end: numbers.
    """

    name: str
    rate: float
    points: np.ndarray
    end: tuple[float, ...]


class Said(NamedTuple):
    """What a picture's text says of one optimizer."""

    rate: float
    end: tuple[float, ...]


def path_curve(surface: Surface, name: str, rate: float) -> Curve:
    path = surfaces.path_of(surface, name, rate)
    return Curve(name, rate, path, tuple(map(float, path[-1])))


def loss_curve(name: str) -> Curve:
    """Trains the demo's model.

    The points are logarithms of mean losses by step; the end is the accuracy on the test images.
    """
    result = train(name, device=Device.cpu, dtype=np.dtype(np.float32))
    means = np.reshape(result.losses, (-1, LOSSES_IN_A_MEAN)).mean(axis=1)
    steps = LOSSES_IN_A_MEAN * np.arange(1, 1 + len(means))
    rate = TUNED.get(name, UNTUNED_RATE)
    return Curve(
        name, rate, np.stack([steps, np.log10(means)], axis=1), (result.accuracies[-1][2],)
    )


def by_family(curves: Sequence[Curve]) -> dict[str, list[list[Curve]]]:
    """Returns the curves of each family, in the order of the exports; equal ones are together."""
    families: dict[str, list[list[Curve]]] = {}
    for curve in curves:
        groups = families.setdefault(entries.entry_of(f"{curve.name}Optimizer").family, [])
        alike = (group for group in groups if are_alike(group[0], curve))
        if (group := next(alike, None)) is not None:
            group.append(curve)
        else:
            groups.append([curve])
    order = [family for family in entries.FAMILIES if family in families]
    return {family: families[family] for family in order}


def are_alike(first: Curve, second: Curve) -> bool:
    """Whether two curves would cover each other: nowhere further apart than half a percent."""
    if first.points.shape != second.points.shape:
        return False
    extent = np.ptp(first.points, axis=0)
    return bool(np.all(np.abs(first.points - second.points) < 0.005 * extent))


def draw(
    path: Path,
    curves: Sequence[Curve],
    title: str,
    how_it_ends: Callable[[Curve], str],
    dress: Callable[[Any], None],
) -> None:
    """Draws a panel for each family.

    Args:
        path: The file; a text in it lists names, rates and ends.
        curves: One for each optimizer.
        title: Of the picture's text.
        how_it_ends: Says so for the legend.
        dress: Draws what is below the curves of a panel.
    """
    families = by_family(curves)
    rows = math.ceil(len(families) / COLUMNS)
    description = "; ".join(map(in_words, curves))
    with picture(path, (8.0, 3.4 * rows), title, description) as figure:
        panels = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for panel in panels[len(families) :]:
            panel.set_axis_off()
        for panel, (family, groups) in zip(panels, families.items(), strict=False):
            panel.set_title(family, fontsize=9, fontweight="bold", loc="left")
            dress(panel)
            for index, group in enumerate(groups):
                x, y = group[0].points.T
                panel.plot(
                    x,
                    y,
                    color=COLORS[index % len(COLORS)],
                    linestyle=DASHES[index % len(DASHES)],
                    linewidth=1.3,
                    marker=MARKERS[index % len(MARKERS)],
                    markevery=[len(x) - 1],
                    markersize=5,
                    label=label_of(group, how_it_ends),
                )
            panel.legend(
                loc="upper left",
                bbox_to_anchor=(0.0, -0.13),
                frameon=False,
                fontsize=7.5,
                handlelength=3.5,
                borderpad=0.0,
                borderaxespad=0.0,
            )


@contextmanager
def picture(path: Path, size: tuple[float, float], title: str, description: str) -> Iterator[Any]:
    """Saves a figure that is drawn in the context.

    Args:
        path: The file.
        size: In inches.
        title, description: Of the file's text.
    """
    import matplotlib
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": path.stem,  # for the same names of parts in each run
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "font.size": 8.0,
        "path.simplify_threshold": 0.5,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None, "Title": title, "Description": description})
    if path.suffix == ".svg":
        path.write_text(shortened(path.read_text()))


def label_of(group: Sequence[Curve], how_it_ends: Callable[[Curve], str]) -> str:
    # A line does not end between a name and its rate.
    names = ", ".join(f"{curve.name}\N{NO-BREAK SPACE}{curve.rate:g}" for curve in group)
    return textwrap.fill(f"{names}: {how_it_ends(group[0])}", 52)


def in_words(curve: Curve) -> str:
    ends = ", ".join(f"{number:.4f}" for number in curve.end)
    return f"{curve.name} at {curve.rate:g} ends at {ends}"


def said_in(path: Path) -> Mapping[str, Said]:
    """Reads the text of a picture: what it shows of each optimizer, by name."""
    return dict(all_said_in(path))


def all_said_in(path: Path) -> list[tuple[str, Said]]:
    """Reads the same of each curve, with the optimizer's name."""
    pattern = r"(\w+) at (\S+) ends at ([-\d., ]+)"
    return [
        (name, Said(float(rate), tuple(map(float, end.split(", ")))))
        for name, rate, end in re.findall(pattern, path.read_text())
    ]


def shortened(svg: str) -> str:
    """Rounds the coordinates of paths to a tenth of a point, and drops turns by nothing."""

    def rounded(found: re.Match[str]) -> str:
        short = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", found[0])
        # Lines go on where no command stands.
        return short if "C" in short else re.sub(r" \nL ", " ", short)

    return re.sub(r' transform="rotate\(-0 [^"]*"', "", re.sub(r' d="[^"]*"', rounded, svg))


def dress_surface(surface: Surface) -> Callable[[Any], None]:
    low_x, high_x, low_y, high_y = surface.frame
    x, y = np.meshgrid(np.linspace(low_x, high_x, 41), np.linspace(low_y, high_y, 41))
    height = np.log10(surface.value(x, y) + 1)

    def dress(panel: Any) -> None:
        panel.contour(x, y, height, levels=4, colors="#BBBBBB", linewidths=0.5, linestyles="-")
        panel.plot(*surface.start, marker="o", color="white", markeredgecolor="black", zorder=5)
        panel.plot(*surface.minimum, marker="*", color="#F0E442", markeredgecolor="black", ms=11)
        panel.set(xlim=(low_x, high_x + MARGIN), ylim=(low_y, high_y + MARGIN))
        panel.locator_params(nbins=4)

    return dress


def draw_surface(surface: Surface, folder: Path = IMAGES, suffix: str = ".svg") -> None:
    curves = [path_curve(surface, name, surfaces.best_rate(surface, name)) for name in NAMES]

    def how_it_ends(curve: Curve) -> str:
        return f"{float(surface.value(*curve.points[-1])):.1g}"

    path = (folder / surface.name).with_suffix(suffix)
    draw(path, curves, surface.title, how_it_ends, dress_surface(surface))


def draw_paths(name: str, folder: Path = PATHS) -> None:
    """Draws an optimizer's path on each surface, at the rates of the pictures of all."""
    rates = [said_in(IMAGES / f"{surface.name}.svg")[name].rate for surface in surfaces.SURFACES]
    curves = [
        path_curve(surface, name, rate)
        for surface, rate in zip(surfaces.SURFACES, rates, strict=True)
    ]
    description = "; ".join(map(in_words, curves))
    path = folder / f"{name}.svg"
    with picture(path, (5.0, 2.1), f"Paths of {name}", description) as figure:
        panels = figure.subplots(1, len(curves))
        for panel, surface, curve in zip(panels, surfaces.SURFACES, curves, strict=True):
            dress_surface(surface)(panel)
            panel.plot(*curve.points.T, color=COLORS[0], linewidth=1.1)
            panel.set_title(f"{surface.title}, rate {curve.rate:g}", fontsize=8, loc="left")


def draw_digits(folder: Path = IMAGES, suffix: str = ".svg") -> None:
    curves = [loss_curve(name) for name in NAMES]
    lowest = math.floor(min(curve.points[:, 1].min() for curve in curves))

    def dress(panel: Any) -> None:
        powers = range(lowest, 1)
        panel.set(xlim=(0, 1.03 * DEFAULT_STEPS), ylim=(lowest, 0.6), yticks=powers)
        panel.set_yticklabels([f"{10.0**power:g}" for power in powers])
        panel.set_xticks([0, DEFAULT_STEPS // 2, DEFAULT_STEPS])
        panel.set_xticklabels(["0", f"{DEFAULT_STEPS // 2}", f"{DEFAULT_STEPS} steps"])
        panel.grid(color="#DDDDDD", linewidth=0.5)

    def how_it_ends(curve: Curve) -> str:
        return f"{curve.end[0]:.1%}"

    path = (folder / DIGITS).with_suffix(suffix)
    draw(path, curves, "The demo's digits", how_it_ends, dress)


def main() -> None:
    for surface in surfaces.SURFACES:
        draw_surface(surface)
    PATHS.mkdir(exist_ok=True)
    for name in NAMES:
        draw_paths(name)
    draw_digits()


if __name__ == "__main__":
    main()
