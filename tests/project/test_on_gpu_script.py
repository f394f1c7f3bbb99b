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
    count_tests,
    first_failure,
    make_table,
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
SLOW = "def test_at_once(): pass\nimport time\ndef test_slow(): time.sleep(60)\n"


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


def test_an_empty_log_of_a_phase_that_failed_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    row = run_phase(Phase("user", 30, [python("exit(1)")]), machine, 100)
    assert row.outcome.startswith("failed")
    assert "user.log is empty: is space left?" in capsys.readouterr().out


def test_a_phase_begins_only_if_its_limit_fits_into_what_is_left(machine: Machine) -> None:
    row = run_phase(Phase("others", 50, [python("1 / 0")]), machine, 49.7)
    assert row == ("others", "left out: it may take 50 s, and 50 s are left", "", "")
    assert not (machine.options.output / "others.log").exists()


def test_tests_that_the_time_does_not_suffice_for_are_counted_and_no_failure(
    machine: Machine,
) -> None:
    """The time is over before the first test begins."""
    row = run_phase(Phase("tests", 10, [of_tests(machine, SLOW)]), machine, 10)
    assert row.outcome == "passed"
    assert row.tests == "2 skipped, 2 of them not begun"


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


def test_where_a_log_cannot_be_written_the_table_has_what_was_done(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = [Phase(name, 30, [python("print('done')")]) for name in ("before", "full", "after")]
    with_phases(monkeypatch, *phases)
    (machine.options.output / "full.log").mkdir()
    before, full, _ = run_phases(machine)
    assert before.outcome == "passed"
    assert full.outcome.startswith("stopped: ")
    assert "full.log" in full.outcome
    assert "passed" in (machine.options.output / "summary.txt").read_text()


def test_a_time_that_is_shorter_than_any_phase_leaves_all_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.options.seconds = 10
    *rows, _ = run_phases(machine)
    assert rows
    assert {row.outcome.partition(":")[0] for row in rows} == {"left out"}


def test_a_list_of_what_is_missing_is_printed_once(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for status in (0, 1):
        lists = python(f"print('numpy:', 'not here'); exit({status})")
        run_phase(machine.setup()._replace(commands=[lists]), machine, 100)
        assert capsys.readouterr().out.count("numpy: not here") == 1


def test_every_command_of_a_phase_runs_and_one_failure_counts(machine: Machine) -> None:
    commands = [python("print('one'); exit(3)"), python("print('two')")]
    assert run_phase(Phase("user", 30, commands), machine, 100).outcome == "failed with status 3"
    assert (machine.options.output / "user.log").read_text() == "one\ntwo\n"


def test_a_command_that_is_killed_is_named_also_where_tests_after_it_pass(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = python("import os; os.kill(os.getpid(), 9)")
    tests = of_tests(machine, "def test_right(): pass")
    row = run_phase(Phase("timings", 30, [killed, tests]), machine, 100)
    assert (row.outcome, row.tests) == ("failed with status -9", "1 passed")
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("status -9 of ")
    assert "os.kill(os.getpid(), 9)" in last


def test_counts_are_those_of_every_pytest_in_a_log() -> None:
    log = (
        ".\n2 passed, 1 skipped, 3 deselected in 0.51s\n= 1 failed, 2 errors in 70.2s (0:01:10) =\n"
    )
    assert count_tests(log) == "2 passed, 1 skipped, 1 failed, 2 errors"
    assert count_tests("copy 12 passed\n") == ""


def test_the_first_failure_is_whole() -> None:
    report = "____ test_a ____\n    a\n_ _ _ _\n    b\nE   wrong"
    log = f"..F\n=== FAILURES ===\n{report}\n____ test_b ____\nE  other\n=== short ===\n"
    assert first_failure(log) == report
    assert first_failure("\n".join(map(str, range(100)))).split()[0] == "40"


def test_the_table_has_columns() -> None:
    rows = [on_gpu.Row("a", "passed", "1 s", "2 passed"), on_gpu.Row("long", "left out")]
    assert make_table(rows).splitlines() == [
        "phase  outcome   time  tests",
        "a      passed    1 s   2 passed",
        "long   left out",
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


@pytest.mark.parametrize("python", ["false", "/nowhere/python"])
def test_an_old_python_or_none_is_refused_in_a_sentence(python: str) -> None:
    finished = run_script("first", python=python)
    assert finished.returncode == 1
    *_, sentence = finished.stderr.splitlines()
    assert sentence.startswith("on_gpu.sh needs Python 3.11 or newer")
    assert python in sentence


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = f"""if True:
        import sys
        from bench import on_gpu
        on_gpu.run.cuda_extra = lambda: "cuda13"
        sys.argv = ["on_gpu.py", "--output", {str(tmp_path / "file")!r}]
        sys.exit(on_gpu.main())"""
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert (finished.returncode, finished.stderr) == (1, "")
    assert re.fullmatch(r"nothing was run: .*/file'\n", finished.stdout)
