"""bench/on_gpu.sh: all phases run whatever becomes of one, and the last table tells them apart."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import on_gpu
from bench.on_gpu import (
    Machine,
    Phase,
    run_phase,
    run_phases,
)

pytestmark = pytest.mark.internal

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import time
def test_right(): pass
def test_wrong():
    expected = "the first failure, in full"
    assert expected == "something else"
def test_also_wrong(): assert not "a second failure"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    options = argparse.Namespace(
        **{"output": tmp_path, "stub_driver": False, "wheels": None, "commit": None},
        **{"call": "first", "seconds": 100},
    )
    return Machine(options, tmp_path)


def python(script: str) -> Sequence[str]:
    return [sys.executable, "-c", script]


def of_tests(machine: Machine, text: str) -> list[str]:
    """Returns a command that runs tests outside of the project."""
    file = machine.folder / "test_some.py"
    file.write_text(text)
    return machine.pytest("-c", os.devnull, "--rootdir", str(machine.folder), str(file))


def test_one_phase_that_fails_is_told_and_stops_no_other(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = [
        Phase("before", 30, [python("print('done')")]),
        Phase("tests", 60, [of_tests(machine, TESTS)]),
        Phase("memcheck", 30, [["compute-sanitizer"]], "compute-sanitizer is not here"),
        Phase("after", 30, [python("print('done')")], note="torch is not here"),
    ]
    rows = [run_phase(phase, machine, 100) for phase in phases]
    assert [(row.phase, row.outcome) for row in rows] == [
        ("before", "passed"),
        ("tests", "failed with status 1"),
        ("memcheck", "left out: compute-sanitizer is not here"),
        ("after", "passed, though torch is not here"),
    ]
    assert rows[1].tests == "2 failed, 1 passed"
    printed = capsys.readouterr().out
    assert 'expected == "something else"' in printed
    assert "AssertionError" in printed
    assert "a second failure" not in printed
    logs = {path.name for path in machine.options.output.glob("*.log")}
    assert logs == {"before.log", "tests.log", "after.log"}
    assert "a second failure" in (machine.options.output / "tests.log").read_text()


def test_a_phase_that_takes_too_long_is_cut_off_and_its_end_is_printed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "import time; print('began', flush=True); time.sleep(100)"
    begin = time.monotonic()
    row = run_phase(Phase("hangs", 7, [python(hangs), python("print('late')")]), machine, 10)
    assert time.monotonic() - begin < 10
    assert row.outcome.startswith("cut off after ")
    assert "began" in capsys.readouterr().out


def test_a_phase_begins_only_if_its_limit_fits_into_what_is_left(machine: Machine) -> None:
    row = run_phase(Phase("others", 50, [python("1 / 0")]), machine, 49.7)
    assert row == ("others", "left out: it may take 50 s, and 50 s are left", "", "")
    assert not (machine.options.output / "others.log").exists()


def with_phases(monkeypatch: pytest.MonkeyPatch, *phases: Phase) -> None:
    monkeypatch.setattr(on_gpu, "list_phases", lambda machine: iter(phases))


def test_a_second_run_leaves_the_files_of_the_first_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_phases(monkeypatch, Phase("user", 30, [python("print('first')")]))
    run_phases(machine)
    with_phases(monkeypatch, Phase("user", 30, [python("print('second')")]))
    again = Machine(machine.options, machine.folder)
    run_phases(again)
    texts = {path.name: path.read_text() for path in machine.options.output.iterdir()}
    assert (texts["user.log"], texts["user-2.log"]) == ("first\n", "second\n")
    assert {"summary.txt", "summary-2.txt"} < {*texts}
    [timings] = [phase for phase in on_gpu.first(again) if phase.name == "timings"]
    assert str(machine.options.output / "timings-2.json") in timings.commands[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_the_table_of_what_was_done(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = f"""if True:
        import os, sys
        from bench import on_gpu
        def python(script): return [[sys.executable, "-c", script]]
        kill = f"import os, time; os.kill({{os.getpid()}}, {int(number)}); time.sleep(60)"
        phases = [
            on_gpu.Phase("before", 30, python("print('done')")),
            on_gpu.Phase("killed", 30, python(kill)),
            on_gpu.Phase("after", 30, python("print('done')")),
        ]
        on_gpu.list_phases = lambda machine: iter(phases)
        on_gpu.run.cuda_extra = lambda: "cuda13"
        sys.argv = ["on_gpu.py", "--output", {str(tmp_path)!r}]
        sys.exit(on_gpu.main())"""
    finished = subprocess.run(python(script), cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (finished.returncode, finished.stderr) == (1, "")
    summary = (tmp_path / "summary.txt").read_text()
    assert summary in finished.stdout
    assert [line.split()[:2] for line in summary.splitlines()[1:]] == [
        ["before", "passed"],
        ["killed", "stopped"],
        ["all", "phases"],
    ]


@pytest.mark.parametrize("call", ["first", "second"])
def test_the_limits_of_a_calls_phases_fit_into_its_time(machine: Machine, call: str) -> None:
    phases = [machine.setup(), *getattr(on_gpu, call)(machine)]
    assert sum(phase.limit for phase in phases) <= on_gpu.SECONDS[call]
    assert on_gpu.SECONDS == {"first": 240, "second": 300}


def test_phases_of_tests_have_all_files_with_tests_of_a_gpu_once(machine: Machine) -> None:
    phases = [*on_gpu.first(machine), *on_gpu.second(machine)]
    listed = [
        argument
        for phase in phases
        if phase.name in ("smoke", "updates", "streams", "others")
        for argument in phase.commands[0]
        if argument.endswith(".py")
    ]
    assert sorted(listed) == on_gpu.files_with("mark.gpu")
    assert len(listed) > 40
    assert all(
        str(os.cpu_count()) in phase.commands[0] for phase in phases if phase.name == "smoke"
    )


def run_script(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": python}
    return subprocess.run(
        [str(ROOT / "bench" / "on_gpu.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ((), 0, "nothing was run"),
        (("--require-gpu",), 1, "nothing was run"),
        (("third",), 2, "invalid choice"),
        (("--wheels", "/nowhere"), 2, "there is no folder /nowhere"),
        (("--help",), 0, "--stub-driver"),
    ],
)
def test_the_script_says_why_it_ran_nothing(
    arguments: tuple[str, ...], status: int, words: str
) -> None:
    finished = run_script(*arguments)
    assert finished.returncode == status
    assert re.search(words, finished.stdout + finished.stderr)
