"""Each test is marked `value`, `contract` or `internal`, and has one of these markers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kinds
import pytest

pytestmark = pytest.mark.internal


def kinds_of(item: Any) -> list[str]:
    return [each.name for each in item.iter_markers() if each.name in kinds.KINDS]


def test_every_test_is_of_one_kind(request: pytest.FixtureRequest) -> None:
    assert {len(kinds_of(item)) for item in request.session.items} == {1}


def test_every_judge_is_a_module_of_tests() -> None:
    support = Path(kinds.__file__).parent
    assert {path.stem for path in support.iterdir()} >= kinds.JUDGES
    assert {path.name for path in support.parent.iterdir()} >= kinds.CONTRACTS


def test_every_test_is_in_a_file_that_may_have_its_kind(request: pytest.FixtureRequest) -> None:
    of_files = {(kind, item.path) for item in request.session.items for kind in kinds_of(item)}
    assert all(kinds.may_have(*each) for each in of_files)
