"""The part of docs/performance.md about growth is what its file of results says."""

from __future__ import annotations

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
from bench.page import find_files
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


def test_a_flat_part_ends_where_the_cost_is_more() -> None:
    assert find_flat([9.0, 3.0, 2.0, FLAT * 2.0, 1 + FLAT * 2.0, 2.0]) == (2, 1, 3)
    assert find_flat([1.0]) == (0, 0, 0)


def test_results_without_growth_are_refused() -> None:
    [file] = find_files(PAGE.read_text(), COMMAND)
    results = read_results(file)
    runs = {name: replace(run, curve=None) for name, run in results.runs.items()}
    with pytest.raises(ValueError, match="0 runs of the curve 'parameters'"):
        list_curves(replace(results, runs=runs))
