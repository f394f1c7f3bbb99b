"""One self-contained page of results: `gpuopt bench --html`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template

from gpuopt.atomic_file import replace_file
from gpuopt.bench.columns import list_columns
from gpuopt.bench.plots import COLORS, draw_bars, draw_curves
from gpuopt.bench.results import Results, Run, describe_run, list_costs, list_curves, to_json

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>gpuopt bench on $device</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; $light
  --ink: #1c1e21; --paper: #ffffff; --faint: #6a7078; --line: #d9dce0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15171a; --faint: #9aa1aa; --line: #363b42; $dark }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 75rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; } h2 a { color: inherit; text-decoration: none; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } th { font-weight: 600; }
p, li, dd { color: var(--faint); margin: .2rem 0; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 0 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
svg { display: block; max-width: 100%; height: auto; } svg.bars { width: 12rem; }
svg text { fill: var(--faint); font-size: 12px; } .axis { stroke: var(--line); }
.bar0 { fill: var(--c0); } .bar1 { fill: var(--c1); } .bar2 { fill: var(--c2); }
.spread { stroke: var(--ink); }
$classes
</style>
</head>
<body>
<h1>gpuopt bench on $device</h1>
<dl>$about</dl>
$body
<script type="application/json" id="results">$results</script>
</body>
</html>
""")


def write_page(results: Results, path: Path) -> None:
    """Writes the page; replaces an earlier one at once.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, make_page(results).encode())


def make_page(results: Results) -> str:
    """Makes HTML with all figures, plots and samples, that loads nothing from elsewhere."""
    about = {
        "gpuopt": results.gpuopt,
        "measured": f"{results.date} UTC",
        **{key: str(value) for key, value in results.machine.items() if value is not None},
    }
    curves, colors = list_curves(results.runs), _choose_colors(results.runs)
    sections = [
        *(_make_curve(name, runs, colors) for name, runs in curves.items()),
        *(_make_run(name, run) for name, run in results.runs.items()),
        _make_list("Not run", results.not_run),
    ]
    # "<" would end the script where a name contains "</script>".
    data = json.dumps(to_json(results)).replace("<", "\\u003c")
    return _PAGE.substitute(
        device=escape(results.device),
        light="".join(f"--c{i}: {light}; " for i, (light, _) in enumerate(COLORS)),
        dark="".join(f"--c{i}: {dark}; " for i, (_, dark) in enumerate(COLORS)),
        classes="\n".join(
            f".s{i} {{ stroke: var(--c{i}); fill: var(--c{i}); color: var(--c{i}); }}"
            for i in range(len(COLORS))
        ),
        about="".join(f"<dt>{escape(key)}</dt><dd>{escape(about[key])}</dd>" for key in about),
        body="\n".join(filter(None, sections)),
        results=data,
    )


def _choose_colors(runs: Mapping[str, Run]) -> dict[str, int]:
    """Returns the number of each contender's color, the same in all plots."""
    contenders = dict.fromkeys(name for run in runs.values() for name in run.contenders)
    return {name: number % len(COLORS) for number, name in enumerate(contenders)}


def _make_curve(name: str, runs: list[Run], colors: Mapping[str, int]) -> str:
    contenders = dict.fromkeys(each for run in runs for each in run.contenders)
    points = {each: list(list_costs(runs, each).items()) for each in contenders}
    legend = " ".join(
        f'<span class="s{colors[contender]}">&#9632;&nbsp;{escape(contender)}</span>'
        for contender in points
    )
    curve = name.partition("/")[0]
    plot = draw_curves(points, colors, curve, f"ns a {runs[0].per}, warm")
    return f"{_make_heading(f'growth: {name}')}<p>{legend}</p>{plot}"


def _make_run(name: str, run: Run) -> str:
    p90s = [each.times[kind].p90_ms for each in run.contenders.values() for kind in run.kinds]
    longest = max(p90s, default=0.0)
    columns = [each for each in list_columns(run) if each.part != "deciles"]
    headings = "".join(
        f"<th>{heading}</th>"
        for heading in (
            "",
            ", then ".join(run.kinds),
            *(each.heading.replace("\n", " ") for each in columns),
        )
    )
    rows = "".join(
        f"<tr><td>{escape(contender)}</td><td>{draw_bars(figures.times, run.kinds, longest)}</td>"
        + "".join(f"<td>{column.write(figures)}</td>" for column in columns)
        for contender, figures in run.contenders.items()
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    copies = "" if run.copy_gb_per_s is None else f"; copies reach {run.copy_gb_per_s:.4g} GB/s"
    return (
        f"{_make_heading(name)}<p>{escape(describe_run(name, run))}{copies}</p>"
        f'<div class="wide"><table><tr>{headings}</tr>{rows}</table></div>'
        f"<ul>{notes}</ul>"
    )


def _make_heading(name: str) -> str:
    anchor = escape(name.replace(" ", "-"), quote=True)
    return f'<h2 id="{anchor}"><a href="#{anchor}">{escape(name)}</a></h2>'


def _make_list(title: str, entries: Mapping[str, str]) -> str:
    if not entries:
        return ""
    items = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in entries.items())
    return f"{_make_heading(title)}<ul>{items}</ul>"
