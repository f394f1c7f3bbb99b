"""After Ctrl-C, or an exception from any signal handler, everything works at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ctrl_c_calls
import interrupted_calls
import interrupted_imports
import pytest

FULL = bool(os.environ.get("GPUOPT_FULL"))
in_full = pytest.mark.skipif(not FULL, reason="make test-full runs it")
# Of each kind of call; there are a dozen.
NUMBER = 1_000 if FULL else 15


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
@pytest.mark.parametrize(
    "compiled", [pytest.param("0", marks=in_full), pytest.param("1", marks=pytest.mark.cxx)]
)
def test_exceptions_at_random_moments_leave_everything_working(
    compiled: str, tmp_path: Path
) -> None:
    check_program(interrupted_calls.__file__, NUMBER, compiled, tmp_path)


def test_a_first_loss_works_after_an_interrupt_of_any_import_of_it() -> None:
    ran = subprocess.run(
        [sys.executable, interrupted_imports.__file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr


CTRL_C = 2_000 if FULL else 10


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such signals")
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)])
def test_ctrl_c_tears_no_step_unnoticed_and_lets_large_ones_go_on(
    device: str, tmp_path: Path
) -> None:
    outcomes = ctrl_c_calls.run_alone(tmp_path, device, CTRL_C)
    assert {sum(each.values()) for each in outcomes.values()} == {CTRL_C}
    for name, outcome in outcomes.items():
        most = {"small step": CTRL_C, "large step": CTRL_C // 100}.get(name, 0)
        assert outcome["refused"] <= most, (name, outcome)


def check_program(program: str, number: int, compiled: str, folder: Path) -> None:
    environment = {
        **os.environ,
        "GPUOPT_THREADS": "3",
        "GPUOPT_COMPILED": compiled,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    finished = subprocess.run(
        [sys.executable, program, str(folder), str(number)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
