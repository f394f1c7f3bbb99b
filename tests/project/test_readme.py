"""The README's figures are those of a file of results, and what it shows is short."""

from __future__ import annotations

import re

from bench.harness import ROOT
from bench.pages import find_files, read_part

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
