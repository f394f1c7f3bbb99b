"""Tests marked `one_in(n)` run about one in n of their cases, with each value of a parameter."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_in
import pytest

pytestmark = pytest.mark.internal

TESTS = Path(__file__).parents[1]


def case(**params: int) -> Any:
    return SimpleNamespace(id="-".join(map(str, params.values())), params=params)


def test_one_in_n_runs_and_each_value_in_one_at_least() -> None:
    cases = [case(a=a, b=b) for a, b in product(range(40), range(4))]
    chosen = one_in.divide(cases, 4, {})
    assert 160 / 6 <= len(chosen) <= 160 / 2
    for name, number in (("a", 40), ("b", 4)):
        assert {each.params[name] for each in chosen} == set(range(number))
    assert one_in.divide(cases, 4, {}) == chosen


FILE = """
import pytest
import textbook

several = pytest.param("several", marks=[pytest.mark.gpu, pytest.mark.gpus(2)])

@pytest.mark.parametrize("case", ["host", pytest.param("one", marks=pytest.mark.gpu), several])
def test_a(case): pass

@pytest.mark.gpu
@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.contract)])
def test_b(case): pass

@pytest.mark.parametrize("case", range(100))
def test_c(case): pass

@pytest.mark.gpu
@pytest.mark.one_in(10**6, case=bool)
@pytest.mark.parametrize("case", range(1, 100))
def test_d(case): pass

@pytest.mark.gpu
@pytest.mark.parametrize("case", [pytest.param(1, marks=pytest.mark.internal)])
def test_e(case): pass

@pytest.mark.gpu
def test_f(): pass
"""


# Of what may make this run another one.
NAMES = {"GPUOPT_FULL", "GPUOPT_ONE_IN"}


def test_cases_that_do_not_run_are_not_made(tmp_path: Path) -> None:
    """But for one of a test that has no other."""
    (tmp_path / "test_some.py").write_text(FILE)
    listed = tmp_path / "files"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest"]
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path)]
    finished = subprocess.run(
        [*command, "-m", "gpu and not gpus and value", "--collect-only", str(tmp_path)],
        env={
            **{name: value for name, value in os.environ.items() if name not in NAMES},
            "GPUOPT_LIST_OF_FILES": str(listed),
            "PYTHONPATH": f"{TESTS}:{TESTS / 'support'}:{TESTS.parent}",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    *tests, _, numbers = finished.stdout.splitlines()
    assert [each.partition("::test_")[2] for each in tests] == ["a[one]", "b[1]", "d[1]", "f"]
    assert numbers.startswith("4/6 tests collected (2 deselected)")
    assert listed.read_text() == str(tmp_path / "test_some.py")
