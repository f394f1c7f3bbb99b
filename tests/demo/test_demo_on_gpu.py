"""The demo trains on a GPU, alone and in parallel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


BY_AUTOGRAD = pytest.param(["--autodiff"], marks=pytest.mark.autograd)


@pytest.mark.gpu
@pytest.mark.rich
@pytest.mark.parametrize("mode", [[], BY_AUTOGRAD, ["--towers", "2"], ["--workers", "2"]])
def test_the_demo_learns_on_a_gpu(mode: list[str], tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    options = ["--device", "gpu:0", "--optimizer", "Adam", "--steps", "30", *mode]
    finished = subprocess.run(
        [sys.executable, "-m", "gpuopt", "demo", *options],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    [accuracy] = re.findall(r"gpu:0 .* ([\d.]+)% │ *$", finished.stdout, re.MULTILINE)
    # Of 10 classes.
    assert float(accuracy) > 80
