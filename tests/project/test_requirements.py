"""Tests that need something skip with a reason, or fail where GPUOPT_REQUIRE says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.internal

TESTS = Path(__file__).parents[1]


TESTS_OF_PACKAGES = """
import sys
import pytest

@pytest.fixture
def saved():
    import xxhash.version

def test_in_its_fixture(saved): pass
def test_in_its_process(): import autograd.numpy
@pytest.mark.rich
def test_in_another_process(): raise ValueError
def test_that_needs_nothing(): pass
def test_of_a_package_that_is_not_gpuopts(): import autogrod
"""


@pytest.mark.parametrize(
    ("require", "counts"),
    [
        ("", "1 failed, 1 passed, 4 skipped"),
        ("autograd,rich", "2 failed, 1 passed, 2 skipped, 1 error"),
    ],
)
def test_what_needs_a_missing_package_is_skipped_with_a_reason_or_fails_where_it_is_required(
    tmp_path: Path, require: str, counts: str
) -> None:
    """The test of a package that gpuopt does not need always fails."""
    (tmp_path / "test_some.py").write_text(TESTS_OF_PACKAGES)
    (tmp_path / "test_others.py").write_text("import safetensors.numpy\ndef test_it(): pass\n")
    finished = run_without("autograd,rich,safetensors,xxhash", tmp_path, require)
    assert counts in finished.stdout
    for package in ("safetensors", "xxhash", *(() if require else ("autograd", "rich"))):
        assert re.search(rf"SKIPPED .*: {package} is not installed", finished.stdout)


def run_without(hidden: str, tests: Path, require: str) -> subprocess.CompletedProcess[str]:
    """Runs tests with the plugins of the project's own, without some packages."""
    environment = {**os.environ, "GPUOPT_HIDDEN": hidden, "GPUOPT_REQUIRE": require}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p"]
    command += ["hidden_packages", "-p", "conftest", "-c", str(TESTS.parent / "pyproject.toml")]
    return subprocess.run(
        [*command, "--rootdir", str(tests), str(tests)],
        env=environment | {"PYTHONPATH": f"{TESTS}:{TESTS / 'support'}:{TESTS.parent}"},
        cwd=tests,
        capture_output=True,
        text=True,
    )


STEPS = """
import hidden_packages
import numpy as np

import gpuopt

table = gpuopt.Variable(np.ones((4, 3), np.float32), name="table")
optimizer = gpuopt.AdamOptimizer(0.1)
optimizer.apply_gradients([(np.ones((4, 3), np.float32), table)])
rows = gpuopt.IndexedSlices(np.ones((2, 3), np.float32), np.array([0, 2]))
optimizer.apply_gradients([(rows, table)])
state = optimizer.state_dict()
optimizer.load_state_dict(state)
assert state and float(table.numpy()[0, 0]) < 0.85
"""


def test_steps_and_states_need_numpy_and_ml_dtypes_alone() -> None:
    hidden = {"GPUOPT_HIDDEN": "autograd,rich,safetensors,xxhash"}
    path = {"PYTHONPATH": f"{TESTS / 'support'}:{TESTS.parent}"}
    subprocess.run([sys.executable, "-c", STEPS], env={**os.environ, **hidden, **path}, check=True)


CALLS_OF_EXTRAS = """
import sys

import hidden_packages
import numpy as np
import pytest

import gpuopt
from gpuopt.__main__ import main

w = gpuopt.Variable(np.ones(3, np.float32), name="w")
optimizer = gpuopt.GradientDescentOptimizer(0.1)
with optimizer.report() as report:
    optimizer.apply_gradients([(w.numpy(), w)])
calls = [
    ("autograd", "losses", lambda: optimizer.minimize(lambda: np.sum(w * w))),
    ("(xxhash|safetensors)", "checkpoints", lambda: gpuopt.Saver([w]).save(sys.argv[1])),
    ("rich", "command", report.tables),
]
for package, extra, call in calls:
    with pytest.raises(ModuleNotFoundError, match=f'need {package}, .* the extra "{extra}"'):
        call()
assert w.numpy().tolist() == [np.float32(0.9)] * 3
assert main(["info"]) == 0
main(["demo"])
"""


def test_what_needs_a_package_of_an_extra_names_both_and_changes_nothing(tmp_path: Path) -> None:
    hidden = {"GPUOPT_HIDDEN": "autograd,rich,safetensors,xxhash"}
    path = {"PYTHONPATH": f"{TESTS / 'support'}:{TESTS.parent}"}
    finished = subprocess.run(
        [sys.executable, "-c", CALLS_OF_EXTRAS, str(tmp_path / "saved")],
        env={**os.environ, **hidden, **path},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 2, finished.stderr
    assert 'tables need rich, which is not installed: pip install rich, or the extra "command"' in (
        finished.stderr
    )
    assert not list(tmp_path.iterdir())
