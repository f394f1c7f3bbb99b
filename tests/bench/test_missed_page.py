"""What bench/README.md says of missed targets is what the files of results say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import missed_page
from bench.host_targets import TARGETS
from bench.missed_page import COMMAND, PAGE, with_misses


def test_the_page_lists_the_newest_results() -> None:
    assert with_misses(PAGE.read_text()) == PAGE.read_text(), f"run {COMMAND}"


@pytest.mark.parametrize(
    ("measured", "listed"),
    [
        ({"2026-11-01-a": 9.0, "2026-11-02-b": 0.1}, []),
        ({"2026-11-01-a": 0.1, "2026-11-02-b": 9.0}, ["9.00"]),
        # of one day, the farthest
        ({"2026-11-02-a": 9.0, "2026-11-02-b": 0.1, "2026-11-02-c": 8.0}, ["9.00"]),
    ],
)
def test_the_newest_day_counts(
    measured: dict[str, float], listed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = next(each for each in TARGETS if each.at_most is not None and each.at_most < 8)
    known = {
        "workload": target.workload,
        "quantity": target.quantity,
        "against": target.against,
    }
    folder = tmp_path / "one-cores"
    folder.mkdir()
    for name, number in measured.items():
        verdict = {"target": known, "measured": number}
        found = {"workloads": {target.workload: {"targets": [verdict]}}}
        (folder / f"{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(missed_page, "RESULTS", tmp_path)
    page = with_misses(PAGE.read_text())
    rows = re.findall(rf"^\| `{target.workload}` \| .* \| (\S+) \| \[", page, re.M)
    assert rows == listed
