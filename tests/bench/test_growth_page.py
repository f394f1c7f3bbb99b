"""The part of docs/performance.md about growth is what its file of results says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.growth_page import (
    COMMAND,
    FLAT,
    PAGE,
    PICTURE,
    find_flat,
    list_curves,
    with_results,
)
from bench.page import find_files, part_of
from gpuopt.bench.results import read_results
from gpuopt.bench.workloads import list_growing_tasks


def test_the_page_shows_the_file_that_it_names() -> None:
    page = PAGE.read_text()
    [file] = find_files(page, COMMAND)
    assert with_results(page, file) == page, f"run {COMMAND}"
    assert file.name in (PAGE.parent / "images" / PICTURE).read_text(), f"run {COMMAND}"


def test_the_file_has_every_task_that_grows() -> None:
    [file] = find_files(PAGE.read_text(), COMMAND)
    found = {name.partition("/")[0] for name in read_results(file).runs}
    assert found == {task.name for task in list_growing_tasks()}


def test_the_page_says_how_many_runs_the_file_doubts_and_of_which_commit_it_is() -> None:
    part = part_of(PAGE.read_text(), COMMAND)
    [file] = find_files(PAGE.read_text(), COMMAND)
    found = json.loads(file.read_text())
    warnings = [run["warnings"] for run in found["runs"].values()]
    spread = [any("spread widely" in each for each in of_run) for of_run in warnings]
    others = [any("spread widely" not in each for each in of_run) for of_run in warnings]
    assert sum(spread) > sum(others) > 0
    text = " ".join(part.split())
    assert (
        f"Of its {len(warnings)} runs, {sum(spread)} have times that spread widely, "
        f"and {sum(others)} have other warnings: copies took "
    ) in text
    _, commit, _ = file.stem.rsplit("-", 2)
    assert f"of {found['date'][:10]} at commit {commit}, on" in text
    fewest = min(len(run["copy_ms"]) for run in found["runs"].values())
    assert f"Medians of {fewest} to " in text


def test_a_flat_part_ends_where_the_cost_is_more() -> None:
    assert find_flat([9.0, 3.0, 2.0, FLAT * 2.0, 1 + FLAT * 2.0, 2.0]) == (2, 1, 3)
    assert find_flat([1.0]) == (0, 0, 0)


def test_results_without_growth_are_refused() -> None:
    [file] = find_files(PAGE.read_text(), COMMAND)
    results = read_results(file)
    runs = {name: replace(run, curve=None) for name, run in results.runs.items()}
    with pytest.raises(ValueError, match="0 runs of the curve 'parameters'"):
        list_curves(replace(results, runs=runs))
