"""run.py gives pytest what it needs, whatever is asked of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import run

pytestmark = pytest.mark.internal


def pytest_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    commands: list[Any] = []

    def record(command: Any, **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run.subprocess, "run", record)
    assert run.run_parts(run.TASKS["test"], arguments) == 0
    [command] = commands
    return command[3:]


@pytest.mark.parametrize("arguments", [[], ["-k", "adam"], ["-x", "tests/project"], ["-n", "0"]])
def test_tests_run_in_several_processes_unless_the_arguments_say_otherwise(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = pytest_command(arguments, monkeypatch)
    assert command.index("-n") < len(command) - len(arguments)  # pytest takes the last -n
    assert command[len(command) - len(arguments) :] == arguments


def gpu_calls(
    cuda: str,
    arguments: list[str],
    statuses: list[int],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[list[str], dict[str, str]]]:
    """Returns the commands of `run.py test-gpu` and their environments."""
    calls: list[Any] = []

    def record(command: Any, **options: Any) -> Any:
        if listed := options["env"].get("GPUOPT_LIST_OF_FILES"):
            Path(listed).write_text("a.py\nb.py")
        calls.append((command[1:], options["env"]))
        return subprocess.CompletedProcess(command, statuses[len(calls) - 1])

    monkeypatch.setattr(run.subprocess, "run", record)
    monkeypatch.setattr(run, "cuda_extra", lambda: cuda)
    monkeypatch.delenv("GPUOPT_DRIVER_DEVICES", raising=False)
    assert run.test_gpu(run.TASKS["test-gpu"].parts, arguments) == status
    assert len(calls) == len(statuses)
    return calls


def test_gpu_tests_run_on_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    [(command, environment)] = gpu_calls("cuda13", ["-k", "adam"], [0], 0, monkeypatch)
    assert command[:2] == ["-m", "pytest"]
    assert command[-4:] == ["-m", "gpu", "-k", "adam"]
    assert environment["GPUOPT_REQUIRE"] == "gpu"


def test_on_the_stub_driver_tests_for_one_gpu_have_one_and_the_others_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, others = gpu_calls("cpu", ["-k", "adam"], [0, 0], 0, monkeypatch)
    for command, environment in (one, others):
        assert command[0] == "tests/support/driver"
        assert environment["GPUOPT_REQUIRE"] == "gpu,driver"
        assert command[-2:] == ["-k", "adam"]
    assert "gpu and not real_gpu and not gpus" in one[0]
    assert one[1]["GPUOPT_DRIVER_DEVICES"] == "1"
    assert "gpu and not real_gpu and gpus" in others[0]
    assert others[0][-4:-2] == ["a.py", "b.py"]
    assert not {"GPUOPT_DRIVER_DEVICES", "GPUOPT_LIST_OF_FILES"} & set(others[1])


@pytest.mark.parametrize(
    ("arguments", "statuses", "status"),
    [
        ([], [1, 0], 1),
        ([], [0, 1], 1),
        ([], [-9, 0], -9),
        ([], [0, run.NO_TESTS], run.NO_TESTS),
        (["-k", "adam"], [0, run.NO_TESTS], 0),
        (["-k", "adam"], [run.NO_TESTS, 1], 1),
        (["-k", "adam"], [run.NO_TESTS, run.NO_TESTS], run.NO_TESTS),
    ],
)
def test_gpu_tests_fail_if_those_for_one_fail_or_the_others(
    arguments: list[str], statuses: list[int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_calls("cpu", arguments, statuses, status, monkeypatch)


def test_commands_side_by_side_show_their_output_as_a_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "import sys; print(sys.argv[1]); print(sys.argv[1], file=sys.stderr); sys.exit({})"
    commands = {
        name: run.Command([sys.executable, "-u", "-c", program.format(status), name], {})
        for name, status in {"first": 0, "second": 3}.items()
    }
    assert run.run_side_by_side(commands) == {"first": 0, "second": 3}
    shown = capfd.readouterr().out
    assert "first\nfirst\n== first: " in shown
    assert "second\nsecond\n== second: " in shown


def test_a_command_that_hangs_is_ended_and_what_it_printed_is_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LONGEST_PART_S", 2.0)
    # Its child, too, holds what it prints to.
    program = (
        "import os, time; print('begun', flush=True); os.fork() if hasattr(os, 'fork') else 0; "
        "time.sleep(30)"
    )
    commands = {"hangs": run.Command([sys.executable, "-c", program], {})}
    assert run.run_side_by_side(commands) == {"hangs": 1}
    shown = capfd.readouterr().out
    assert "begun\n" in shown
    assert "hangs did not end within 2 s" in shown


def test_makefile_has_every_task() -> None:
    [tasks] = re.findall(r"^TASKS = (.*)$", (run.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tasks.split() == list(run.TASKS)
