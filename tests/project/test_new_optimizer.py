"""make new-optimizer: what it writes fails until it is filled in; a second call does the rest."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import new_optimizer
import numpy as np
import pytest

pytestmark = pytest.mark.internal

CHANGED = [
    "gpuopt/optimizers/__init__.py",
    "gpuopt/short_names.py",
    "gpuopt/demo/data/learning_rates.toml",
    "tests/support/textbook.py",
    "tests/support/optimizer_page/entries.py",
    "CHANGELOG.md",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the project that an optimizer's pieces are written into."""
    for file in CHANGED:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(new_optimizer.ROOT / file, tmp_path / file)
    (tmp_path / "gpuopt/optimizers").mkdir(parents=True, exist_ok=True)
    shutil.copy(new_optimizer.ROOT / "gpuopt/optimizers/adam.py", tmp_path / "gpuopt/optimizers")
    monkeypatch.setattr(new_optimizer, "ROOT", tmp_path)
    return tmp_path


def module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("new_one", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_nothing_of_an_optimizer_is_left_to_fill_in() -> None:
    assert not [place for name in new_optimizer.names() for place in new_optimizer.left(name)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("grams", "'grams' is no name: a capital, letters and digits"),
        ("AdaGrad", "Adagrad exists, which is spelled as AdaGrad but for its case"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_changes_nothing(
    name: str, said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in project.rglob("*.*") if file.is_file()}
    assert new_optimizer.main(name.split()) == 1
    assert said in capsys.readouterr().err
    assert {file: file.read_bytes() for file in project.rglob("*.*") if file.is_file()} == before


def test_the_pieces_fail_until_they_are_filled_in(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new_optimizer.main(["Grams"]) == 0
    written = project / "gpuopt/optimizers/grams.py"
    with pytest.raises(NotImplementedError, match="FILL IN the formula of Grams"):
        module(written)
    with pytest.raises(NotImplementedError, match="FILL IN Grams, from its paper"):
        module(project / "tests/support/textbook.py").grams(np.ones(3), [])
    entries = module(project / "tests/support/optimizer_page/entries.py")
    assert entries.ENTRIES["GramsOptimizer"].family not in entries.FAMILIES
    places = {place.file for place in new_optimizer.left("Grams")}
    assert len(places) == 4
    capsys.readouterr()
    assert new_optimizer.main(["Grams"]) == 1
    assert "CHANGELOG.md:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["AAA", "NamedWithVeryManyWordsIndeed"])
def test_lines_are_inserted_in_the_order_of_the_alphabet(name: str, project: Path) -> None:
    assert new_optimizer.main([name]) == 0
    exported = new_optimizer.names()
    assert name in exported
    modules = [new_optimizer.module_of(each) for each in exported if each != "TorchNAdam"]
    assert modules == sorted(modules)
    assert f"\n{name} = _all.{name}Optimizer\n" in (project / "gpuopt/short_names.py").read_text()
    text = (project / "tests/support/optimizer_page/entries.py").read_text()
    keys = [each.lower() for each in re.findall(r'^    "(\w+)Optimizer": Entry', text, re.M)]
    place = keys.index(name.lower())
    assert keys[max(place - 1, 0)] <= keys[place] <= keys[min(place + 1, len(keys) - 1)]
    lines = (project / "gpuopt/optimizers/__init__.py").read_text().splitlines()
    assert max(map(len, lines)) <= 100


def test_when_all_is_filled_in_what_follows_is_written_and_then_the_name_is_taken(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generated: list[str] = []
    monkeypatch.setattr(new_optimizer, "generate", lambda name: generated.append(name) or 0)
    assert new_optimizer.main(["Grams"]) == 0
    for file in {project / place.file for place in new_optimizer.left("Grams")}:
        file.write_text(file.read_text().replace(new_optimizer.FILL_IN, "Filled in"))
    assert new_optimizer.main(["Grams"]) == 0
    assert generated == ["Grams"]
    with (project / new_optimizer.RATES).open("a") as rates:
        rates.write("Grams = 0.1\n")
    assert new_optimizer.main(["Grams"]) == 1
    assert "Grams exists: gpuopt/optimizers/grams.py" in capsys.readouterr().err
