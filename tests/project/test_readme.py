"""The README's figures are those of a file of results, and what it shows is short."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import page
from bench.readme_page import PAGE, find_results, with_table
from gpuopt.bench.results import read_results, write_results

README = PAGE.read_text()


def test_the_table_has_the_figures_of_the_file_that_it_names() -> None:
    assert with_table(README, find_results(README)) == README


def test_the_table_says_what_its_file_doubts_and_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = read_results(find_results(README))
    names = list(results.runs)
    warnings = {
        names[0]: ["copies took 0.70 times as long", "the times of gpuopt spread widely"],
        names[1]: ["copies took 1.30 times as long", "the CPU was throttled by its heat"],
        names[2]: ["the times of gpuopt spread widely"],
    }
    runs = {
        name: replace(run, copy_ms=[1.0] * (7 + at), warnings=warnings.get(name, []))
        for at, (name, run) in enumerate(results.runs.items())
    }
    for folder in ("RESULTS", "ROOT"):
        monkeypatch.setattr(page, folder, tmp_path)
    file = tmp_path / "today.json"
    not_run = {"llama-layer/adam/float32": "it needs more memory"}
    write_results(replace(results, runs=runs, not_run=not_run), file)
    written = with_table(README, file)
    rows = [line for line in written.splitlines() if line.startswith("|") and " ms |" in line]
    assert ["†" in row for row in rows] == [True, True] + [False] * (len(names) - 2)
    assert f"Medians of 7 to {6 + len(names)} rounds." in written
    assert (
        "marks rows of which the file warns: "
        "copies took 0.70 to 1.30 times as long; the CPU was throttled by its heat.\n"
    ) in written
    assert "Not run: a layer of Llama 2 7B (adam/float32): it needs more memory.\n" in written
    write_results(replace(results, runs={names[4]: runs[names[4]]}, not_run={}), file)
    written = with_table(README, file)
    assert "Medians of 11 rounds." in written
    assert "†" not in written
    assert "Not run" not in written


def test_a_page_without_a_file_of_results_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README.md names no file of results"):
        find_results("# gpuopt\n")


def test_each_example_has_ten_lines_at_most() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) >= 4
    assert all(len(example.splitlines()) <= 10 for example in examples)


def test_results_that_readers_would_not_find_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "today.json"
    copy.write_bytes(find_results(README).read_bytes())
    with pytest.raises(ValueError, match=r"today.json is not in bench/results: put it there"):
        with_table(README, copy)
