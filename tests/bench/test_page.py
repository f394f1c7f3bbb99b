"""The page of results: all figures are there, and a browser shows it without a fault."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import show

from gpuopt.bench.page import make_page, write_page
from gpuopt.bench.results import Figures, Results, Run, make_figures, to_json


def figures(ms: float, launches: int | None = None) -> Figures:
    warm = [ms * (1 + i / 50) for i in range(10)]
    kept = {"state_bytes": 8_000_000, "peak_extra_bytes": 4_500_000}
    kept |= {} if launches is None else {"launches": launches, "waits": launches}
    return make_figures({"warm": warm, "cold": [3 * each for each in warm]}, 10**6, 10.5, **kept)


@pytest.fixture(scope="module")
def results() -> Results:
    names = ("gpuopt", "gpuopt, numpy alone", "torch fused", "array operations")
    runs = {
        "gpt2-124m/adam/float32": Run(
            "the 148 tensors of GPT-2 124M",
            3_484_314_624,
            None,
            None,
            None,
            None,
            [1.0] * 10,
            10.5,
            {name: figures(1.5 + i, 7) for i, name in enumerate(names)},
            {"a <b>library</b> & more": "it is </script> not installed"},
            ["9.0 programs want 2 cores"],
        )
    }
    for exponent in range(10, 28):
        size = 2**exponent
        runs[f"parameters-2^{exponent}/adam/float32"] = Run(
            f"one tensor of 2^{exponent} elements",
            28 * size,
            "parameter",
            size,
            "parameters",
            size,
            [1.0] * 10,
            10.5,
            {name: figures(0.01 + i + size / 1e6) for i, name in enumerate(names)},
        )
    machine = {"cpu": "A CPU with a rather long name, at 2.20 GHz", "cores": 2, "torch": None}
    return Results("0.1", "2026-11-23 12:00", "cpu", machine, runs, {"160m/adam/float32": "large"})


def test_the_page_has_all_figures_and_samples(results: Results) -> None:
    page = make_page(results)
    for name, run in results.runs.items():
        assert name in page
        for contender, each in run.contenders.items():
            assert f"<td>{contender}</td>" in page
            for times in each.times.values():
                assert f"{times.median_ms:.4g}" in page
    assert "160m/adam/float32: large" in page
    assert "9.0 programs want 2 cores" in page
    [data] = re.findall(r'id="results">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data) == json.loads(json.dumps(to_json(results)))


def test_launches_have_columns_where_they_are_known(results: Results) -> None:
    tables = re.findall(r"<table>(.*?)</table>", make_page(results), re.DOTALL)
    assert len(tables) == len(results.runs)
    for table, run in zip(tables, results.runs.values(), strict=True):
        assert ("<th>launches</th><th>waits</th>" in table) == run.counts_launches
        # A row ends where the next one begins.
        _, *rows = table.split("<tr>")[1:]
        assert {row.count("<td>") for row in rows} == {table.count("<th>")}
    assert {run.counts_launches for run in results.runs.values()} == {True, False}


def test_the_page_loads_nothing_and_takes_names_for_no_markup(results: Results) -> None:
    page = make_page(results)
    assert "<b>library" not in page
    assert page.count("</script>") == 1
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "url(" not in page
    assert "@import" not in page


def test_each_curve_goes_through_all_of_its_runs(results: Results) -> None:
    lines = re.findall(r'<polyline points="([^"]+)"', make_page(results))
    assert len(lines) == 4
    for line in lines:
        xs = [float(point.partition(",")[0]) for point in line.split()]
        assert len(xs) == 18
        assert xs == sorted(xs)


def test_a_contender_has_one_color_in_all_plots(results: Results) -> None:
    [run] = (run for name, run in results.runs.items() if name.startswith("parameters-2^10/"))
    few = {name: run.contenders[name] for name in ("gpuopt", "array operations")}
    rows = {
        f"rows-{at}/adam/float32": replace(run, curve="rows", per="row", at=at, contenders=few)
        for at in (1, 10)
    }
    page = make_page(replace(results, runs={**results.runs, **rows}))
    legend = set(re.findall(r'<span class="(s\d)">&#9632;&nbsp;(.*?)</span>', page))
    assert len(legend) == len({name for _, name in legend}) == 4
    for color, title in re.findall(r'<g class="(s\d)">.*?<title>(.*?): ', page):
        assert (color, title) in legend


@pytest.mark.browser
@pytest.mark.parametrize("width", [500, 1400])
def test_a_browser_shows_the_page_without_errors_or_overflow(
    results: Results, width: int, tmp_path: Path
) -> None:
    report, console = show(make_page(results), tmp_path, f"--window-size={width},900")
    assert report["faults"] == []
    assert report["width"] == width
    assert console == ""


@pytest.mark.browser
def test_the_browser_test_notices_errors_and_overflow(results: Results, tmp_path: Path) -> None:
    wide = "<div style='width: 3000px'>wide</div><script>console.error('no'); nothing()</script>"
    report, console = show(make_page(results).replace("</h1>", f"</h1>{wide}"), tmp_path)
    assert report["faults"]
    assert "ReferenceError" in console


@pytest.mark.browser
def test_the_page_is_dark_where_the_reader_likes_it(results: Results, tmp_path: Path) -> None:
    papers = [
        show(make_page(results), tmp_path, f"--blink-settings=preferredColorScheme={scheme}")[0][
            "paper"
        ]
        for scheme in (0, 1)
    ]
    assert papers == ["rgb(21, 23, 26)", "rgb(255, 255, 255)"]


def test_the_page_is_written_at_once(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("an earlier one")
    write_page(results, path)
    assert path.read_text() == make_page(results)
    assert list(tmp_path.iterdir()) == [path]
