"""Each test is marked `value`, `contract` or `internal`, and has one of these markers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kinds
import pytest

pytestmark = pytest.mark.internal


def a_test(file: Path, of_file: Sequence[str] = (), own: Sequence[str] = ()) -> Any:
    """A test with its own markers, in a file with markers."""

    def node(names: Sequence[str]) -> Any:
        return SimpleNamespace(own_markers=[SimpleNamespace(name=name) for name in names])

    item, module = node(own), node(of_file)
    item.path = file
    item.listchain = lambda: [module, item]
    item.iter_markers = lambda: iter([*item.own_markers, *module.own_markers])
    item.add_marker = lambda name: item.own_markers.append(SimpleNamespace(name=name))
    return item


def kinds_of(item: Any) -> list[str]:
    return [each.name for each in item.iter_markers() if each.name in kinds.KINDS]


def test_every_test_is_of_one_kind(request: pytest.FixtureRequest) -> None:
    assert {len(kinds_of(item)) for item in request.session.items} == {1}


def test_every_judge_is_a_module_of_tests() -> None:
    support = Path(kinds.__file__).parent
    assert {path.stem for path in support.iterdir()} >= kinds.JUDGES
    assert {path.name for path in support.parent.iterdir()} >= kinds.CONTRACTS


@pytest.mark.parametrize(
    ("folder", "imports", "kind"),
    [
        ("step", "import textbook", "value"),
        ("project", "from textbook import adam", "value"),
        ("project", "from fuzzing.settings import seeds", "value"),
        ("project", "import textbooks", "contract"),
        ("step", "import pytest", "internal"),
    ],
)
def test_a_file_is_of_the_kind_of_its_imports_or_its_folder(
    folder: str, imports: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / folder / "test_it.py"
    file.parent.mkdir()
    file.write_text(f'"""It."""\n\n{imports}\n')
    item = a_test(file, ["gpu"])
    kinds.mark([item])
    assert kinds_of(item) == [kind]


def test_the_closest_marker_counts(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    marked = a_test(file, ["emulator", "value"])
    marked_again = a_test(file, ["value"], ["internal"])
    kinds.mark([marked, marked_again])
    assert [kinds_of(each) for each in (marked, marked_again)] == [["value"], ["internal"]]


@pytest.mark.parametrize(
    ("line", "may_have"),
    [
        ("import textbook", {"value"}),
        ("@pytest.mark.value", {"value", "contract"}),
        ("pytestmark = pytest.mark.internal", {"internal", "contract"}),
    ],
)
def test_a_file_may_have_tests_of_its_own_kind_and_of_those_that_it_names(
    line: str, may_have: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "project" / "test_it.py"
    file.parent.mkdir()
    file.write_text(f"{line}\n")
    assert {kind for kind in kinds.KINDS if kinds.may_have(kind, file)} == may_have


def test_every_test_is_in_a_file_that_may_have_its_kind(request: pytest.FixtureRequest) -> None:
    of_files = {(kind, item.path) for item in request.session.items for kind in kinds_of(item)}
    assert all(kinds.may_have(*each) for each in of_files)
