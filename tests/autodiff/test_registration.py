"""gpuopt beside a package called autograd that is not the HIPS library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "a package": {"autograd/__init__.py": "class Tensor: pass", "autograd/tensor.py": ""},
    "a module": {"autograd.py": "class Tensor: pass"},
    "names as in the library": {
        "autograd/__init__.py": "from autograd.core import Tensor; from autograd import tracer",
        "autograd/core.py": "class Tensor: pass",
        "autograd/tracer.py": "",
        "autograd/numpy.py": "raise SystemExit('nobody has asked for this')",
    },
    # As a version with which gpuopt has not been tried.
    "a library that lacks something": {
        "autograd/__init__.py": "from autograd.core import Tensor; from autograd import tracer",
        "autograd/core.py": "class Tensor: pass\nclass VJPNode: pass",
        "autograd/tracer.py": "class Box: pass",
    },
}
IMPORTS = ["import autograd; import gpuopt", "import gpuopt; import autograd"]
STEP = """
import numpy as np
w = gpuopt.Variable(np.ones(3, np.float32), name="w")
gpuopt.GradientDescentOptimizer(0.5).apply_gradients([(np.ones(3, np.float32), w)])
assert list(w.numpy()) == [0.5] * 3
assert autograd.__file__.startswith(folder) and autograd.Tensor
"""


def run(folder: Path, files: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = f"import sys; folder = {str(folder)!r}; sys.path.insert(0, folder)\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("imports", IMPORTS)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.one_in(8)
def test_a_users_own_autograd_is_imported_beside_gpuopt(
    kind: str, imports: str, tmp_path: Path
) -> None:
    ran = run(tmp_path, FILES[kind], f"{imports}\n{STEP}")
    assert ran.returncode == 0, ran.stderr
    warns = "autograd does not know gpuopt's Variables" in ran.stderr
    assert warns == (kind == "a library that lacks something")


def test_a_package_that_is_looked_for_before_it_is_imported_has_its_loaders_methods(
    tmp_path: Path,
) -> None:
    look = "from importlib.util import find_spec; spec = find_spec('autograd')"
    is_found = f"assert 'Tensor' in spec.loader.get_source('autograd'); {IMPORTS[1]}"
    ran = run(tmp_path, FILES["a package"], f"import gpuopt; {look}; {is_found}\n{STEP}")
    assert ran.returncode == 0, ran.stderr


def test_an_error_of_a_users_own_autograd_is_raised_as_it_is(tmp_path: Path) -> None:
    ran = run(tmp_path, {"autograd.py": "1 / 0"}, "import gpuopt; import autograd")
    assert ran.stderr.splitlines()[-1].startswith("ZeroDivisionError")


@pytest.mark.parametrize("kind", ["a package", "a module"])
@pytest.mark.parametrize("imported", ["import autograd", ""])
def test_the_gradient_of_a_loss_names_the_package_that_has_autograds_name(
    kind: str, imported: str, tmp_path: Path
) -> None:
    program = f"""
{imported}
import gpuopt
w = gpuopt.Variable([1.0], name="w")
for _ in range(2):
    try:
        gpuopt.GradientDescentOptimizer(0.5).minimize(lambda: w)
    except ImportError as error:
        print(error)
{"assert autograd is sys.modules['autograd']" if imported else ""}
"""
    ran = run(tmp_path, FILES[kind], program)
    assert ran.returncode == 0, ran.stderr
    said = ran.stdout.splitlines()
    assert said[0] == said[1]
    assert said[0].startswith("the gradients of a loss are computed by HIPS autograd")
    assert str(tmp_path) in said[0]
