"""The examples in the documentation run as they stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# What a guide's model must have learnt at its end.
OUTCOMES: dict[str, Callable[[Any], bool]] = {
    "logistic_regression.md": lambda names: names["accuracy"] > 0.95,
    "perceptron.md": lambda names: names["accuracy"] > 0.95,
    "embeddings.md": lambda names: names["after"] < 0.1 * names["before"],
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if any("import cupy" in example for example in examples(page)) else []


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks(page), id=page.name) for page in PAGES if examples(page)],
)
def test_examples_of_a_page_run_in_order(page: Path) -> None:
    names: dict[str, object] = {}
    for example in examples(page):
        exec(compile(example, page.name, "exec"), names)
    assert OUTCOMES.get(page.name, lambda names: True)(names)


def test_every_outcome_has_its_guide() -> None:
    assert set(OUTCOMES) <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link
