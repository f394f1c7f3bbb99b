"""The README's figures are those of a file of results, and what it shows is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.readme_page import PAGE, find_results, with_table

README = PAGE.read_text()


def test_the_table_has_the_figures_of_the_file_that_it_names() -> None:
    assert with_table(README, find_results(README)) == README


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
