"""The command line says what it can do, ends as it says, and gives advice that works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gpuopt
from gpuopt import __main__ as command_line
from gpuopt import environment
from gpuopt.distributed.communicators.mpi_description import REQUIREMENT

PACKAGE = Path(gpuopt.__file__).parent
COMMANDS = ("info", "demo", "bench", "show")


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    """Runs `gpuopt` as a user does, with warnings as errors."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-W", "error", "-m", "gpuopt", *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)  # type: ignore[call-overload,no-any-return]


def run(*arguments: str) -> tuple[int, str, str]:
    running = start(*arguments, stdout=subprocess.PIPE)
    output, errors = running.communicate()
    return running.returncode, output.decode(), errors.decode()


def test_help_names_every_command_and_every_variable_of_the_environment() -> None:
    status, output, errors = run("--help")
    assert (status, errors) == (0, "")
    for command in COMMANDS:
        assert re.search(rf"^    {command} +\w", output, re.MULTILINE)
    read = environment.names()
    assert {"GPUOPT_THREADS", "GPUOPT_CHECK", "CXX"} <= set(read)
    assert all(re.search(rf"^  {name} +\w", output, re.MULTILINE) for name in read)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_says_what_it_does_and_explains_each_argument(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([command, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    usage, description, _ = output.split("\n\n", 2)
    assert usage.startswith(f"usage: gpuopt {command} ")
    assert len(description) > 80
    commands = next(
        action.choices
        for action in command_line._make_parser()._actions
        if isinstance(action.choices, dict)
    )
    assert set(commands) == set(COMMANDS)
    assert all(action.help for action in commands[command]._actions)
    # Defaults are as they are typed.
    shown = re.findall(r"\(default:\s*(.*?)\)", output, re.DOTALL)
    assert not [default for default in shown if not default or default.startswith(("[", "("))]
    if command == "bench":
        assert {"adam", "float32", "30"} <= set(shown)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["--help"], ""), (["info"], "1"), (["demo", "--steps", "1"], "")],
)
def test_a_reader_that_stops_early_causes_no_traceback(
    arguments: list[str], unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    running = start(*arguments, stdout=writing_end, cwd=tmp_path)
    os.close(writing_end)
    _, errors = running.communicate()
    assert errors == b""
    # argparse itself ignores a help text that cannot be written.
    assert running.returncode == 1 or "--help" in arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "gpuopt: a command is missing: bench, demo, info or show; --help says more"),
        (["train"], "gpuopt: argument COMMAND: invalid choice: 'train'"),
        (["info", "--json"], "gpuopt: unrecognized arguments: --json"),
        (["demo", "--steps", "none"], "gpuopt demo: argument --steps: 'none' is not a whole"),
        (["bench", "no-such-task"], "gpuopt: no task is named no-such-task; --list shows them"),
        (["bench", "--json", os.curdir], "gpuopt: '.' is a folder\n"),
        (
            ["bench", "--compare", "no-such-file"],
            "gpuopt bench: there is no file no-such-file; --json FILE writes results\n",
        ),
        (
            ["bench", "--compare", os.curdir],
            "gpuopt bench: . cannot be read: Is a directory; --json FILE writes results\n",
        ),
    ],
)
def test_wrong_arguments_end_with_status_2_and_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(command_line.main(arguments))
    output, errors = capsys.readouterr()
    assert (ended.value.code, output) == (2, "")
    assert errors.startswith(words)
    assert errors.count("\n") == 1


def test_ctrl_c_ends_a_command_with_status_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "train", interrupted)
    assert command_line.main(["demo", "--device", "cpu"]) == 130
    # An older rich ends the line of its bar.
    assert [text.strip() for text in capfd.readouterr()] == ["", ""]


def test_no_advice_names_a_package_that_no_index_has() -> None:
    for module in PACKAGE.rglob("*.py"):
        assert not re.search(r"pip install ['\"]?gpuopt", module.read_text()), module


def test_advice_about_mpi_installs_what_the_extra_does() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    assert extras["mpi"] == [REQUIREMENT]
