"""Writes what a step costs as it grows into docs/performance.md, and draws its picture.

`python -m bench.growth_page FILE` takes a file that `gpuopt bench --growth --json` has written;
without it, the one that the page names.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness import ROOT
from bench.page import (
    COLORS,
    describe_doubts,
    describe_rounds,
    find_files,
    make_table,
    name_file,
    name_versions,
    picture,
    replace_between,
)
from gpuopt.bench.results import Results, Run, read_results, three_digits

PAGE = ROOT / "docs" / "performance.md"
PICTURE = "growth.svg"
COMMAND = ".venv/bin/python -m bench.growth_page"
# What is called flat costs at most so many times what it costs at best.
FLAT = 2.0


class Curve(NamedTuple):
    """What grows, and beside whom.

    Attributes:
        title: What a step updates.
        axis: What grows.
        peer: The contender that gpuopt is compared with in words.
    """

    title: str
    axis: str
    peer: str


_CURVES = {
    "parameters": Curve("one tensor", "elements", "torch fused"),
    "tensors": Curve("tensors of 256 elements", "tensors", "torch fused"),
    "rows": Curve("rows of a table of 1,000,000 x 16", "rows of the gradient", "torch sparse"),
    "height": Curve("8,192 rows of a table", "rows of the table", "torch sparse"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.growth_page", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", help="a file of gpuopt bench --growth")
    page = PAGE.read_text()
    file = parser.parse_args().results or find_files(page, COMMAND)[0]
    _draw(list_curves(read_results(file)), file)
    PAGE.write_text(with_results(page, file))
    print(f"written: {PAGE.relative_to(ROOT)}")


def list_curves(results: Results) -> dict[str, list[Run]]:
    """Returns the runs of each curve, from the smallest on.

    Raises:
        ValueError: a curve is not there, as in results without `--growth`.
    """
    curves: dict[str, list[Run]] = {name: [] for name in _CURVES}
    for run in results.runs.values():
        if run.curve is not None:
            curves[run.curve].append(run)
    for name, runs in curves.items():
        if len(runs) < 2:
            raise ValueError(f"the results have {len(runs)} runs of the curve {name!r}")
        runs.sort(key=_at)
    return curves


def find_flat(costs: Sequence[float]) -> tuple[int, int, int]:
    """Returns the position of the least cost, and the first and last of those near it.

    The costs from the first to the last are at most `FLAT` times the least one.
    """
    least = costs.index(min(costs))
    first = last = least
    while first > 0 and costs[first - 1] <= FLAT * costs[least]:
        first -= 1
    while last < len(costs) - 1 and costs[last + 1] <= FLAT * costs[least]:
        last += 1
    return least, first, last


def with_results(page: str, file: Path) -> str:
    """Returns the text of docs/performance.md with what a file of results says."""
    results = read_results(file)
    curves, machine = list_curves(results), results.machine
    parts = [
        "![Nanoseconds that each parameter, tensor or row costs each library, in four panels; the\n"
        f"table below has some of the numbers.](images/{PICTURE})",
        "\n".join(_describe(name, runs) for name, runs in curves.items()),
        _table(curves).strip(),
        f"From `{name_file(file)}`,\n"
        f"of {results.date[:10]} at commit {_commit(file)}, on {machine['cores']} cores of an\n"
        f"{machine['cpu']}, {name_versions(machine)}.\n{_describe_noise(results)}",
    ]
    return replace_between(page, COMMAND, "\n\n".join(parts) + "\n")


def _commit(file: Path) -> str:
    """Reads it from the file's name: <date>-<commit>-<what>.json."""
    return file.stem.split("-")[3]


def _describe_noise(results: Results) -> str:
    runs = results.runs.values()
    spread = sum(run.warnings != run.other_warnings for run in runs)
    others = sum(bool(run.other_warnings) for run in runs)
    why = f":\n{doubts}" if (doubts := describe_doubts(results)) else ""
    return (
        f"Medians of {describe_rounds(results)}. Of its {len(runs)} runs, {spread} have times\n"
        f"that spread widely, and {others} have other warnings{why}."
    )


def _describe(name: str, runs: Sequence[Run]) -> str:
    """Says where a curve is flat, and how gpuopt's time compares with the peer's."""
    curve = _CURVES[name]
    ours, peers = (_list_costs(runs, name) for name in ("gpuopt", curve.peer))
    costs = list(ours.values())
    least, first, last = find_flat(costs)
    ratios = {at: ours[at] / cost for at, cost in peers.items()}
    best, worst = (of(ratios, key=lambda at: ratios[at]) for of in (min, max))
    step_ms = [three_digits(run.contenders["gpuopt"].warm.median_ms) for run in (runs[0], runs[-1])]
    at = [_size(_at(run)) for run in runs]
    return (
        f"- **{curve.title[0].upper()}{curve.title[1:]}.** A {runs[0].per} costs gpuopt\n"
        f"  {three_digits(costs[least])} ns where it costs least, at {at[least]} {curve.axis},\n"
        f"  and at most {FLAT:g} times that from {at[first]} to {at[last]}. A step takes\n"
        f"  {step_ms[0]} ms at {at[0]}, and {step_ms[1]} ms at {at[-1]}.\n"
        f"  This is from {ratios[best]:.2f} (at {_size(best)}) to {ratios[worst]:.2f} times\n"
        f"  (at {_size(worst)}) what {curve.peer} takes."
    )


def _table(curves: Mapping[str, Sequence[Run]]) -> str:
    contenders = dict.fromkeys(
        name for runs in curves.values() for run in runs for name in run.contenders
    )
    rows = []
    for name, runs in curves.items():
        # Of many points, every third; the picture has all.
        shown = runs if len(runs) < 10 else [*runs[:-1:3], runs[-1]]
        for run in shown:
            costs = (three_digits(run.cost_ns(each)) for each in contenders)
            rows.append([f"{_CURVES[name].axis}: {_size(_at(run))}", f"a {run.per}", *costs])
    return make_table(["nanoseconds", "", *contenders], rows)


def _draw(curves: Mapping[str, Sequence[Run]], file: Path) -> None:
    title = f"What a parameter, tensor or row costs as steps grow, from {file.name}"
    with picture(PICTURE, title, (8.0, 6.4)) as figure:
        colors: dict[str, str] = {}
        for panel, (name, runs) in zip(figure.subplots(2, 2).flat, curves.items(), strict=True):
            curve = _CURVES[name]
            for contender in runs[0].contenders:
                color = colors.setdefault(contender, COLORS[len(colors) % len(COLORS)])
                costs = _list_costs(runs, contender)
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


def _list_costs(runs: Sequence[Run], contender: str) -> dict[int, float]:
    """Returns what a contender's parameter, tensor or row costs, by how many there are."""
    costs = ((_at(run), run.cost_ns(contender)) for run in runs)
    return {at: cost for at, cost in costs if cost is not None}


def _at(run: Run) -> int:
    assert run.at is not None
    return run.at


def _size(number: int) -> str:
    """Writes a power of 2 from 2^10 on as one, and other numbers with commas."""
    exponent = number.bit_length() - 1
    return f"2^{exponent}" if exponent >= 10 and number == 2**exponent else f"{number:,}"


if __name__ == "__main__":
    main()
