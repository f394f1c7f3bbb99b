"""The README's figures are those of a file of results, and what it shows is short."""

from __future__ import annotations

import re

from bench.harness import ROOT
from bench.pages import find_files, read_part
from gpuopt.bench.results import read_results

README = (ROOT / "README.md").read_text()


def test_each_example_has_ten_lines_at_most() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(examples) >= 4
    assert all(len(example.splitlines()) <= 10 for example in examples)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def first_screen() -> str:
    return README.partition("\n## ")[0]


def test_the_row_of_the_first_screen_is_one_of_the_table_and_certain() -> None:
    heading, _, row = [cells(line) for line in first_screen().splitlines() if line[:1] == "|"]
    table = read_part("steps").splitlines()
    of_table = [cells(line) for line in table if line.startswith("|")]
    [same] = [each for each in of_table if each[0] == row[0]]
    figures = dict(zip(of_table[0], same, strict=True))
    assert dict(zip(heading, row, strict=True)).items() <= figures.items()
    assert not set("~†") & set(first_screen())
    assert f"({find_files('steps')[0].relative_to(ROOT)})" in first_screen()


def test_the_first_screen_says_for_which_models_array_operations_are_quicker() -> None:
    [name] = re.findall(r"\((bench/results/\S+-growth\.json)\)", first_screen())
    runs = read_results(ROOT / name).runs

    def is_quicker(task: str) -> bool:
        figures = runs[f"{task}/adam/float32"].contenders
        arrays, ours = (figures[name].times["cold"] for name in ("array operations", "gpuopt"))
        return arrays.median_ms < ours.median_ms

    by_size = [is_quicker(f"parameters-2^{power}") for power in range(10, 28)]
    assert by_size == [True] * 9 + [False] * 9
    text = " ".join(first_screen().split())
    assert "up to 262,144 elements" in text
    assert "from 524,288 elements" in text
    assert [is_quicker(f"tensors-{10**power}") for power in range(5)] == [True] * 2 + [False] * 3
    assert runs["tensors-10/adam/float32"].description == "10 tensors of 256 elements"
    assert "or 10 of 256 each" in text
    assert "or 100 such tensors" in text
