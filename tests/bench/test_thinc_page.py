"""The measured part of docs/guides/thinc.md is what its file of results says."""

from __future__ import annotations

import json

from bench.page import find_files, part_of
from bench.thinc_page import COMMAND, PAGE, with_results


def test_the_page_shows_the_file_that_it_names() -> None:
    page = PAGE.read_text()
    [file] = find_files(page, COMMAND)
    assert with_results(page, file) == page, f"run {COMMAND}"


def test_the_page_has_the_quotient_of_rounds_of_the_training() -> None:
    page = PAGE.read_text()
    [file] = find_files(page, COMMAND)
    trained = json.loads(file.read_text())["workloads"]["spacy_train_64_averages_optimizer"]
    samples = (trained["contenders"][who]["samples_ms"] for who in ("gpuopt", "Thinc's"))
    quotients = sorted(ours / its for ours, its in zip(*samples, strict=True))
    middle = quotients[len(quotients) // 2]
    assert f" and {middle:.2f} times." in part_of(page, COMMAND)
