"""CuPy finds all that kernels include, and keeps what it has compiled from process to process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuopt.kernel_sources import kernel_root

SCRIPT = Path(__file__).with_name("compile_through_cupy.py")
# The script's status where there is none.
NO_NVRTC = 77

pytestmark = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")


def compile_kernels(cache: Path, kernels: Path) -> dict[str, int]:
    """Returns the files in CuPy's cache after a process of its own, and when each was written."""
    tests, root = SCRIPT.parent, SCRIPT.parent.parent
    result = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, kernels],
        env={
            **os.environ,
            "CUPY_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join([str(root), str(tests)]),
        },
        capture_output=True,
        text=True,
    )
    if result.returncode == NO_NVRTC:
        pytest.skip("CuPy finds no NVRTC")
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    return {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}


def test_a_second_process_compiles_nothing_until_a_header_changes(tmp_path: Path) -> None:
    cache, kernels = tmp_path / "cache", tmp_path / "kernels"
    shutil.copytree(str(kernel_root()), kernels)
    first = compile_kernels(cache, kernels)
    assert len(first) == 11
    assert compile_kernels(cache, kernels) == first
    with (kernels / "element.cuh").open("a") as header:
        header.write("// another\n")
    assert len(compile_kernels(cache, kernels)) == 2 * len(first)
