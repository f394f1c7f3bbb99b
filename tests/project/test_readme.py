"""The README's figures are those of a file of results, and what it shows is short."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import page
from bench.harness import ROOT
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
    table = written.partition("writes from here -->")[2]
    rows = [line for line in table.splitlines() if line.startswith("|") and " ms |" in line]
    assert ["†" in row for row in rows] == [True, True] + [False] * (len(names) - 2)
    assert f"Medians of 7 to {6 + len(names)} rounds." in written
    assert (
        "marks rows with a warning in that file: "
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


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def first_screen() -> str:
    return README.partition("\n## ")[0]


def test_the_row_of_the_first_screen_is_one_of_the_table_and_certain() -> None:
    heading, _, row = [cells(line) for line in first_screen().splitlines() if line[:1] == "|"]
    table = README.partition("writes from here -->")[2].splitlines()
    of_table = [cells(line) for line in table if line.startswith("|")]
    [same] = [each for each in of_table if each[0] == row[0]]
    figures = dict(zip(of_table[0], same, strict=True))
    assert dict(zip(heading, row, strict=True)).items() <= figures.items()
    assert not set("~†") & set(first_screen())
    assert f"({find_results(README).relative_to(ROOT)})" in first_screen()


def test_the_first_screen_says_for_which_models_array_operations_are_quicker() -> None:
    [name] = re.findall(r"\((bench/results/\S+-growth\.json)\)", first_screen())
    runs = read_results(ROOT / name).runs

    def is_quicker(task: str) -> bool:
        figures = runs[f"{task}/adam/float32"].contenders
        return figures["array operations"].cold.median_ms < figures["gpuopt"].cold.median_ms

    by_size = [is_quicker(f"parameters-2^{power}") for power in range(10, 28)]
    assert by_size == [True] * 9 + [False] * 9
    assert "up to 262,144 elements" in first_screen()
    assert "from\n524,288 elements" in first_screen()
    assert [is_quicker(f"tensors-{10**power}") for power in range(5)] == [True] * 2 + [False] * 3
    assert runs["tensors-10/adam/float32"].description == "10 tensors of 256 elements"
    assert "or 10 of 256 each" in first_screen()
    assert "or 100 such tensors" in first_screen()
