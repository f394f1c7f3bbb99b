"""Shells complete the command line by the scripts that it prints."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from gpuopt import __main__ as command_line
from gpuopt.completion import SHELLS

# What bash does when Tab is pressed; outside of that, compopt says that nothing is being completed.
PRESS_TAB = """
set -e
source "$1"
shift
function=$(complete -p gpuopt)
function=${function##*-F }
function=${function%% *}
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"$function" 2> /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def print_script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert command_line.main(["--print-completion", shell]) == 0
    script, errors = capsys.readouterr()
    assert errors == ""
    return script


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["be"], ["bench"]),
        (["--pr"], ["--print-completion"]),
        (["--print-completion", "z"], ["zsh"]),
        (["bench", "gpt"], ["gpt2-124m"]),
        (["bench", "--js"], ["--json"]),
        (["bench", "--json", "old"], ["old.json"]),
        (["bench", "--optimizer", "adam"], ["adam", "adam_w"]),
        (["demo", "--optimizer", "RowW"], ["RowWiseAdagrad"]),
        (["demo", "--device", ""], ["auto", "cpu", "gpu"]),
        (["info", "--h"], ["--help"]),
    ],
)
def test_tab_completes_commands_options_and_their_values_in_bash(
    words: list[str],
    completed: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "old.json").touch()
    script = tmp_path / "script"
    script.write_text(print_script("bash", capsys))
    command = ["bash", "-c", PRESS_TAB, "bash", str(script), "gpuopt", *words]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (finished.stderr, finished.returncode) == ("", 0)
    assert finished.stdout.splitlines() == completed


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shells_script_has_the_commands_options_and_tasks(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = print_script(shell, capsys)
    for word in ("info", "demo", "bench", "tolerance", "gpt2-124m", "RowWiseAdagrad"):
        assert word in script


def test_without_shtab_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpuopt.completion.find_spec", lambda name: None)
    assert command_line.main(["--print-completion", "bash"]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == (
        'gpuopt: completion needs shtab, which is in gpuopt\'s extra "completion": '
        "pip install shtab\n"
    )


def test_tests_have_the_shtab_of_the_extra() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    [requirement] = pyproject["project"]["optional-dependencies"]["completion"]
    assert requirement in pyproject["dependency-groups"]["test"]
