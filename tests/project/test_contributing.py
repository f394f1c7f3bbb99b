"""The optimizer that CONTRIBUTING.md adds as an example passes the shared tests, as printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "dist", "site", "results", "*.png")
EXPORTS = "gpuopt/optimizers/__init__.py"
# "1. `path` does this:", further text, and a block of code.
STEP = re.compile(
    r"^\d\. `(\S+)`(?:(?!^\d\. ).)*?^   ```\w+\n(.*?)^   ```$", re.DOTALL | re.MULTILINE
)


def steps() -> dict[str, str]:
    """What the page has one write, by file."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("\n## Add an optimizer\n")[2].partition("\n## ")[0]
    return {path: textwrap.dedent(code) for path, code in STEP.findall(section)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, after the page's steps."""
    copy = tmp_path_factory.mktemp("contributing") / "project"
    shutil.copytree(ROOT, copy, ignore=SKIPPED)
    for path, code in steps().items():
        file = copy / path
        text = file.read_text() if file.exists() else ""
        if path == EXPORTS:
            first = text.index("from gpuopt.")
            file.write_text(text[:first] + code + text[first:])
        else:
            file.write_text(text + "\n\n" + code if text else code)
    run(copy, "tests/support/tables.py")
    return copy


def run(project: Path, *arguments: str) -> str:
    """Runs Python in a copy of the project; returns what it prints."""
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_page_has_three_pieces() -> None:
    assert [Path(path).name for path in steps()] == [
        "sign_descent.py",
        "textbook.py",
        "__init__.py",
    ]


@pytest.mark.cxx
@pytest.mark.skipif(not os.environ.get("GPUOPT_FULL"), reason="make test-full runs it")
def test_the_example_passes_the_tests_that_hold_for_every_optimizer(project: Path) -> None:
    tests = [
        "tests/optimizers/test_every_optimizer.py",
        "tests/rules/test_rule_parity.py",
        "tests/project/test_docs.py",
        "tests/demo/test_demo.py",
    ]
    its_own = "SignDescent or sign_descent"
    of_all = "is_complete or belong_together or tables or demo_knows"
    # Its page links to the picture that `make gallery` draws.
    chosen = f"({its_own} or {of_all}) and not links_lead"
    printed = run(project, "-m", "pytest", "-q", *tests, "-k", chosen)
    found = re.search(r"(\d+) passed", printed)
    assert found is not None
    assert int(found[1]) >= 30, printed


def test_the_example_is_named_after_its_class_and_is_in_the_tables_and_the_demo(
    project: Path,
) -> None:
    program = "import gpuopt; print(gpuopt.SignDescentOptimizer().get_name())"
    assert run(project, "-c", program) == "SignDescent\n"
    assert "SignDescent," in (project / "README.md").read_text()
    page = (project / "docs" / "optimizers.md").read_text()
    assert "| [`SignDescentOptimizer`](optimizers/SignDescent.md) | Sign" in page
    page = (project / "docs" / "optimizers" / "SignDescent.md").read_text()
    assert "```text\nw -= learning_rate * sign(g)\n```" in page
    printed = run(project, "-m", "gpuopt", "demo", "--optimizer", "signdescent", "--steps", "20")
    assert "│ SignDescent " in printed
