"""Of which kind a test is: `value`, `contract` or `internal`. Each is of exactly one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

KINDS = {"value", "contract", "internal"}
# Modules of tests/support whose values do not come from what is tested.
JUDGES = {
    "catching_up",
    "derivative_cases",
    "device_cases",
    "every_backend",
    "fuzzing",
    "golden_cases",
    "kernel_updates",
    "late_pairs",
    "late_tables",
    "naive_loss_scale",
    "pairs_of_stages",
    "peers",
    "row_programs",
    "row_sums",
    "stale_training",
    "sync_golden",
    "textbook",
    "textbook_schedules",
    "workers",
    "wrapper_programs",
}
# Folders of tests about files, commands, pages and messages.
CONTRACTS = {"bench", "checkpoint", "demo", "interop", "project", "state"}


def mark(items: Sequence[pytest.Item]) -> None:
    """Leaves each test with one marker of a kind: its own, or its file's."""
    chosen = [closest_kind(item) or kind_of(item.path) for item in items]
    for item, kind in zip(items, chosen, strict=True):
        for node in item.listchain():
            node.own_markers[:] = [each for each in node.own_markers if each.name not in KINDS]
        item.add_marker(kind)


def closest_kind(item: pytest.Item) -> str | None:
    return next((each.name for each in item.iter_markers() if each.name in KINDS), None)


def markers_of(test: pytest.Item, more: Sequence[pytest.Mark]) -> set[str]:
    """Returns the names of the markers that a case of a test will have, by the case's own."""
    assert test.parent is not None
    markers = [*test.own_markers, *more, *test.parent.iter_markers()]
    names = [each.name for each in markers]
    kind = next((name for name in names if name in KINDS), None) or kind_of(test.path)
    return {*names, kind} - (KINDS - {kind})


def may_have(kind: str, file: Path) -> bool:
    """Whether a file may have tests of a kind, as far as that shows without importing it."""
    return kind_of(file) == kind or f"mark.{kind}" in file.read_text()


@cache
def kind_of(file: Path) -> str:
    """Returns the kind of a file without a marker: by a judge that it imports, or by its folder."""
    imported = re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE)
    if not JUDGES.isdisjoint(imported):
        return "value"
    return "contract" if file.parent.name in CONTRACTS else "internal"
