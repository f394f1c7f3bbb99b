"""bench/first_run.py: what it prints to paste, and that one failure hides nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import first_run
from bench.first_run import CHECKS, make_block, time_step
from gpuopt.bench.compare import Verdict, compare_results
from gpuopt.bench.results import Figures, Run, make_figures, read_results

pytestmark = pytest.mark.internal


def figures(num_bytes: int, device_us: float = 2.0, copy_gb_per_s: float | None = None) -> Figures:
    us = {"device": device_us, "device_dirty": 3.0, "wall": 4.0, "host": 5.0}
    times = {kind: [each / 1e3] * 3 for kind, each in us.items()}
    return make_figures(times, num_bytes, copy_gb_per_s, first_step_ms=6.0)


COPY = Run("copy", 8000, contenders={"copy": figures(8000)})


@pytest.mark.gpu
def test_a_first_run_on_a_gpu_checks_and_times_and_prints_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    arguments = ["--small", "--seconds", "1", "--json", str(file), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["first_run.py", *arguments])
    assert first_run.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("```text", "```")
    assert lines[1].endswith(", commit abc")
    assert f"{len(CHECKS)} of {len(CHECKS)} checks agree with numpy" in lines
    written = read_results(file)
    assert len(written.runs) == 8
    [copied] = [each for each in written.runs.values() if "copy" in each.contenders]
    for name, run in written.runs.items():
        [row] = [line for line in lines if line.startswith(name)]
        ours = run.contenders["copy" if run is copied else "gpuopt"]
        device_ms, dirty_ms = (ours.times[each].median_ms for each in ("device", "device_dirty"))
        cells = row.removeprefix(name).split()
        assert cells[:2] == [f"{1e3 * device_ms:.1f}", f"{1e3 * dirty_ms:.1f}"]
        assert cells[5] == f"{(run.bytes_moved or 0) / device_ms / 1e6:.0f}"
        if run is not copied:
            assert run.copy_ms == copied.contenders["copy"].times["device"].samples_ms
            ratio = device_ms / np.median(run.copy_ms)
            share = (run.bytes_moved or 0) / (copied.bytes_moved or 0) / ratio
            assert ours.share_of_copy == pytest.approx(share, rel=1e-3)
    assert (written.commit, written.not_run) == ("abc", {})
    assert written.machine["checks"] == dict.fromkeys(CHECKS)
    verdicts = {each.verdict for each in compare_results(written, written)}
    assert verdicts <= {Verdict.SAME, Verdict.AMBIGUOUS}


@pytest.mark.gpu
def test_a_step_that_fails_is_named_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = first_run.list_tasks

    def with_a_broken_one(cupy: Any, sizes: Any) -> Any:
        (copy, make_copy), (other, make_other), *_ = tasks(cupy, sizes).items()
        return {"broken": lambda: 1 / 0, copy: make_copy, other: make_other}

    monkeypatch.setattr(first_run, "list_tasks", with_a_broken_one)
    *_, (runs, failures) = first_run.time_all(0, first_run.SMALL)
    assert len(runs) == 2
    assert failures == {"broken": "ZeroDivisionError: division by zero"}


def of_one_task(monkeypatch: pytest.MonkeyPatch, file: Path, after: BaseException | None) -> None:
    """Has the program time one task, and then raise an error."""

    def time_all(seconds: float, sizes: Any) -> Any:
        yield {"copy": COPY}, {}
        if after is not None:
            raise after

    monkeypatch.setattr(first_run, "why_no_gpu", lambda: None)
    monkeypatch.setattr(first_run, "CHECKS", {})
    monkeypatch.setattr(first_run, "time_all", time_all)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--json", str(file)])


def test_after_ctrl_c_what_was_timed_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_one_task(monkeypatch, tmp_path / "results.json", KeyboardInterrupt())
    assert first_run.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("copy ") for line in lines)
    assert "other timings: stopped by Ctrl-C" in lines
    assert read_results(tmp_path / "results.json").runs == {"copy": COPY}


def test_without_gpuopt_it_says_how_to_install_it() -> None:
    command = [sys.executable, "-S", "-E", first_run.__file__]
    finished = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert finished.returncode == 1
    [sentence] = finished.stderr.splitlines()
    assert "pip install '.[cuda13]'" in sentence


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_run, "why_no_gpu", lambda: "no NVIDIA driver")
    monkeypatch.setattr(sys, "argv", ["first_run.py"])
    assert first_run.main() == 1
    assert capsys.readouterr().out == "nothing was run: no NVIDIA driver\n"


@pytest.mark.parametrize("name", CHECKS)
def test_checks_move_their_variables(name: str) -> None:
    """On the CPU, a check agrees with itself, and not with another number of steps."""
    for variable in CHECKS[name].run("cpu"):
        start = np.random.default_rng(0).normal(size=variable.shape)
        assert abs(variable - start).max() > 10 * CHECKS[name].tolerance


class Script:
    """A clock whose device takes 2 ms, or 3 with dirty caches."""

    can_be_dirty = True

    def synchronize(self) -> None:
        pass

    def device_ms(self, step: Any, host_ms: float, *, dirty: bool = False) -> float:
        step()
        return 3.0 if dirty else 2.0

    def whole_ms(self, step: Any) -> float:
        raise NotImplementedError

    def runs_ahead(self, step: Any, host_ms: float) -> bool | None:
        raise NotImplementedError


def test_times_are_medians_and_both_kinds_of_caches_are_kept_apart() -> None:
    calls = []
    found = time_step(Script(), lambda: calls.append(1), seconds=0, num_bytes=4000)
    times = {kind: each.median_ms for kind, each in found.times.items()}
    assert (times["device"], times["device_dirty"]) == (2.0, 3.0)
    assert times["wall"] >= times["host"] > 0
    assert found.gb_per_s == 4000 / 2e6
    assert len(calls) == 1 + 2 + 1 + 2 * 3 + 3  # the fewest rounds and steps


def test_a_block_names_wrong_checks_and_steps_that_failed_and_compares_with_a_copy() -> None:
    of_adam = {"gpuopt": figures(4000, copy_gb_per_s=4.0), "torch fused": figures(4000, 7.0)}
    runs = {"copy": COPY, "Adam": Run("Adam", 4000, contenders=of_adam)}
    checks = {"Adam": None, "LAMB": "AssertionError: off"}
    machine = {"numpy": "2.5", "GPUOPT_CACHE_DIR": "not set"}
    block = make_block("today", machine, checks, runs, {"big": "MemoryError: no"})
    lines = block.splitlines()
    assert lines[2:4] == ["numpy            2.5", "GPUOPT_CACHE_DIR not set"]
    assert "1 of 2 checks agree with numpy" in lines
    assert "LAMB: AssertionError: off" in lines
    assert "big: MemoryError: no" in lines
    [headings] = [line for line in lines if "device us" in line]
    assert re.split(r"  +", headings.strip()) == [
        *("device us", "dirty L2", "wall us", "host us", "first ms", "GB/s", "of copy"),
        *("torch us", "torch wall"),
    ]
    [copy] = [line for line in lines if line.startswith("copy")]
    [adam] = [line for line in lines if re.match("Adam  ", line)]
    assert copy.split()[1:] == ["2.0", "3.0", "4.0", "5.0", "6", "4"]
    assert adam.split()[1:] == ["2.0", "3.0", "4.0", "5.0", "6", "2", "0.50", "7.0", "4.0"]
