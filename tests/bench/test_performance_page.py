"""The measured part of docs/performance.md is what its files of results say."""

from __future__ import annotations

from bench.page import find_files
from bench.performance_page import COMMAND, PAGE, picture_of, with_results


def test_the_page_shows_the_files_that_it_names() -> None:
    page = PAGE.read_text()
    files = find_files(page, COMMAND)
    assert files
    assert with_results(page, files) == page, f"run {COMMAND}"


def test_each_picture_is_of_its_file() -> None:
    for file in find_files(PAGE.read_text(), COMMAND):
        drawn = (PAGE.parent / "images" / picture_of(file)).read_text()
        assert f"at {file.stem.rpartition('-')[2]}:" in drawn, f"run {COMMAND}"
