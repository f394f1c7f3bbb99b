"""A child forked at any moment works, or says at once why it cannot; its parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked_children
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.mark.parametrize("scenario", forked_children.SCENARIOS)
def test_a_forked_child_works_or_fails_at_once(scenario: str, tmp_path: Path) -> None:
    if scenario == "in_a_compile" and not forked_children.has_compiler():
        pytest.skip("g++ is not installed")
    environment = {**os.environ, "GPUOPT_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, forked_children.__file__, scenario, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
