"""The program that puts Python on the stub driver starts it, or says what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.internal

ROOT = Path(__file__).resolve().parents[2]


def test_without_nvidias_headers_a_program_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "nvidia").mkdir()
    # Python looks no further for a package that is no namespace.
    (tmp_path / "nvidia" / "__init__.py").touch()
    command = [sys.executable, "tests/support/driver", "-c", "print('it went on')"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (finished.returncode, finished.stdout) == (1, "")
    [sentence] = finished.stderr.splitlines()
    assert "nvidia-cuda-runtime" in sentence
    assert "nvidia-cuda-crt" in sentence
