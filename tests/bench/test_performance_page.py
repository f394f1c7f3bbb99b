"""The measured part of docs/performance.md is what its files of results say."""

from __future__ import annotations

from bench.performance_page import COMMAND, PAGE, files_of, picture_of, with_results


def test_the_page_shows_the_files_that_it_names() -> None:
    page = PAGE.read_text()
    files = files_of(page)
    assert files
    assert with_results(page, files) == page, f"run {COMMAND}"


def test_each_picture_is_of_its_file() -> None:
    for file in files_of(PAGE.read_text()):
        drawn = (PAGE.parent / "images" / picture_of(file)).read_text()
        assert f"at {file.stem.rpartition('-')[2]}:" in drawn, f"run {COMMAND}"
