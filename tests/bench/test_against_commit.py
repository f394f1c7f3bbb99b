"""`bench.against_commit`."""

from __future__ import annotations

import re
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench import against_commit
from bench.harness import ROOT, write_results
from gpuopt.bench.results import read_results, summarize

# An older gpuopt: this one, without `update`, and without a module that 3c94777f has not.
_OLDER = f"""
import sys
from pathlib import Path
__path__[:] = [{str(ROOT / "gpuopt")!r}]
exec(Path(__path__[0], "__init__.py").read_text())
del Optimizer.update
sys.modules["gpuopt.backends.cpu.cores"] = None
"""


def test_steps_are_timed_beside_those_of_a_commit_and_what_it_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpuopt").mkdir()
    (tmp_path / "gpuopt" / "__init__.py").write_text(_OLDER)
    monkeypatch.setattr(against_commit, "checkout", lambda commit: nullcontext(tmp_path))
    monkeypatch.setattr(against_commit, "_BLOCK_MS", 0.01)
    write = partial(write_results, output=tmp_path / "results")
    monkeypatch.setattr(against_commit, "write_results", write)
    monkeypatch.setattr("sys.argv", ["", "older", "--only", "*_of_[1a]_*", "--rounds", "3"])
    against_commit.main()
    [path] = tmp_path.glob("results/*-against-*/*.json")
    [(name, run)] = read_results(path).runs.items()
    assert name == "gradient_of_1_operations"
    assert run.description.startswith("Gradient of 1 operation")
    ours, theirs = (each.usual for each in run.contenders.values())
    assert len(ours.samples_ms) == len(theirs.samples_ms) == 3
    timed, *left_out, _ = capsys.readouterr().out.splitlines()
    assert timed.startswith(name)
    assert f"{ours.median_ms:.3f} / {theirs.median_ms:.3f} ms = " in timed
    assert len(left_out) == 2
    assert all("left out" in line and "no attribute 'update'" in line for line in left_out)


def test_the_commits_worktree_is_removed() -> None:
    worktrees = _list_worktrees()
    with against_commit.checkout("HEAD") as checkout:
        assert (checkout / "gpuopt" / "__init__.py").is_file()
    assert not checkout.exists()
    assert _list_worktrees() == worktrees


def test_the_interval_is_of_the_rounds_ratios_where_the_machine_slows_down_both() -> None:
    random = np.random.default_rng(0)
    machine_ms = np.exp(random.normal(0, 0.5, 100))
    ours_ms = 1.1 * machine_ms * np.exp(random.normal(0, 0.02, 100))
    said = against_commit.describe_ratio(summarize(ours_ms), summarize(machine_ms))
    ratio, low, high = map(float, re.findall(r"[\d.]+", said.partition(" = ")[2]))
    assert 1.0 < low < 1.1 < high < 1.25
    assert low < ratio < high


def _list_worktrees() -> str:
    try:
        finished = subprocess.run(
            ["git", "worktree", "list"], cwd=ROOT, check=True, capture_output=True, text=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("this is no git checkout")
    return finished.stdout
