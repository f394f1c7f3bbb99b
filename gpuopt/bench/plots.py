"""Plots of results, as SVG in a page whose style gives colors to `.s0`, `.bar0` and the like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from gpuopt.bench.results import Times

# By Okabe and Ito, told apart by all eyes; lighter ones for dark pages.
COLORS = (
    ("#0072b2", "#56b4e9"),
    ("#b34700", "#ff9a57"),
    ("#007a58", "#2fc79c"),
    ("#9b4f80", "#e29ac6"),
    ("#8a6d00", "#f0d34a"),
    ("#4b4f56", "#b9c0c9"),
    ("#b0003a", "#ff7f9f"),
    ("#3b3bb3", "#a3a3ff"),
)
_BAR_WIDTH = 200
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 320, 60, 30, 26, 44


def draw_bars(times: Mapping[str, Times], kinds: Sequence[str], longest: float) -> str:
    """Draws a bar of each kind's median, with a line between its deciles.

    Args:
        times: By kind.
        kinds: Those that are drawn, from the top on.
        longest: The time that is as long as the plot, in milliseconds.
    """
    parts = []
    for number, kind in enumerate(kinds):
        each, top = times[kind], 2 + 11 * number
        low, middle, high = (
            _BAR_WIDTH * ms / longest for ms in (each.p10_ms, each.median_ms, each.p90_ms)
        )
        parts.append(
            f'<rect class="bar{number}" x="0" y="{top}" width="{middle:.2f}" height="9">'
            f"<title>{kind}: {each.median_ms:.4g} ms ({each.p10_ms:.4g} to {each.p90_ms:.4g})"
            f'</title></rect><line class="spread" x1="{low:.2f}" x2="{high:.2f}" '
            f'y1="{top + 4.5}" y2="{top + 4.5}"/>'
        )
    size = f'viewBox="0 0 {_BAR_WIDTH} {2 + 11 * len(kinds)}"'
    return f'<svg class="bars" role="img" {size}>{"".join(parts)}</svg>'


def draw_curves(
    points: Mapping[str, Sequence[tuple[float, float]]],
    colors: Mapping[str, int],
    across: str,
    up: str,
) -> str:
    """Draws a curve for each name, on logarithmic axes.

    Args:
        points: The (x, y) of each curve, all above 0; there is one at least.
        colors: By name, the number of each curve's color.
        across: What x is.
        up: What y is.
    """
    every = [point for curve in points.values() for point in curve]
    xs, ys = _Axis([x for x, _ in every]), _Axis([y for _, y in every])
    across_px, up_px = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + across_px * xs.share(x), _TOP + up_px * (1 - ys.share(y))

    parts = []
    for power in xs.powers():
        x, _ = place(10.0**power, 10.0**ys.low)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + up_px}"/>'
        )
        parts.append(_label(x, _TOP + up_px + 16, _write_power(power), "middle"))
    for power in ys.powers():
        _, y = place(10.0**xs.low, 10.0**power)
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_LEFT + across_px}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(_label(_LEFT - 6, y + 4, _write_power(power), "end"))
    parts.append(_label(_LEFT + across_px / 2, _HEIGHT - 8, across, "middle"))
    parts.append(_label(4, 14, up, "start"))
    for name, curve in points.items():
        places = [place(*point) for point in sorted(curve)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<g class="s{colors[name]}"><polyline points="{joined}" style="fill:none" '
            'stroke-width="2"/>'
        )
        for (x, y), (at, cost) in zip(places, sorted(curve), strict=True):
            title = f"{escape(name)}: {cost:.4g} at {at:g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{title}</title></circle>')
        parts.append("</g>")
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<svg class="curves" role="img" {size}>{"".join(parts)}</svg>'


class _Axis:
    """A logarithmic axis from one power of 10 to another."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(self.low + 1, math.ceil(math.log10(max(values))))

    def share(self, value: float) -> float:
        return (math.log10(value) - self.low) / (self.high - self.low)

    def powers(self) -> range:
        return range(self.low, self.high + 1)


def _write_power(power: int) -> str:
    """Writes a power of 10, as in 0.1, 1000 and 10⁴."""
    if -3 <= power <= 3:
        return f"{10.0**power:g}"
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
