"""CuPy finds the headers that kernels include, and keeps compiled kernels for later processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuopt.rules.sources import kernel_root

SCRIPT = Path(__file__).parents[2] / "support" / "compile_through_cupy.py"
# The script's status where there is none.
NO_NVRTC = 77

pytestmark = [
    pytest.mark.nvrtc,
    pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed"),
]


USERS_RULE = """
from pathlib import Path

import gpuopt


@gpuopt.update_rule(cuda=gpuopt.CudaSource(Path(__file__).parent, "halves.cuh", "users::Halves"))
def halves(var, grad):
    var -= 0.5 * grad
"""
USERS_HEADER = """
#include "shared/math.cuh"

namespace users {
struct Halves {
  static constexpr int num_slots = 0;
  template <class Real>
  struct Scalars {};
  template <class Real>
  GPUOPT_INLINE static void apply(Real& var, Real grad, Real*, const Scalars<Real>&) {
    var -= grad / Real(2);
  }
};
}  // namespace users
"""


def compile_kernels(cache: Path, kernels: Path, *rule: str) -> dict[str, int]:
    """Returns the files in CuPy's cache after a process of its own, and when each was written."""
    tests, root = SCRIPT.parent, SCRIPT.parents[2]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, kernels, *rule],
        env={
            **os.environ,
            "CUPY_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join([str(root), str(tests), str(cache.parent)]),
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
    with (kernels / "shared" / "element.cuh").open("a") as header:
        header.write("// another\n")
    assert len(compile_kernels(cache, kernels)) == 2 * len(first)


def test_a_users_rule_is_compiled_again_when_its_own_header_changes(tmp_path: Path) -> None:
    cache, users = tmp_path / "cache", tmp_path / "users_project"
    users.mkdir()
    (users / "rule.py").write_text(USERS_RULE)
    (users / "halves.cuh").write_text(USERS_HEADER)

    def compile_rule() -> dict[str, int]:
        return compile_kernels(cache, Path(str(kernel_root())), "users_project.rule:halves")

    first = compile_rule()
    assert len(first) == 11
    assert compile_rule() == first
    (users / "halves.cuh").write_text(USERS_HEADER.replace("Real(2)", "Real(3)"))
    assert len(compile_rule()) == 11 + 3  # the kernels that apply the rule
