"""Installs packages that gpuopt and its tests need and a machine lacks, without a network.

    python3 bench/gpu_environment.py FOLDER [--wheels WHEELS]
    python3 bench/gpu_environment.py --fetch WHEELS [--python 3.12]

The first command lists the packages that are missing on the machine, or too old or too new for
pyproject.toml. It installs them from WHEELS into FOLDER, but never another numpy, CuPy or torch.
The machine's Python finds them if PYTHONPATH names FOLDER. The machine's own packages stay as they
are.

The second command, on a machine with a network, fetches the wheels for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import operator
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_OLDEST_PYTHON = (3, 11)
_FOR_TESTS = ("pytest", "pytest-xdist", "pytest-benchmark", "hypothesis")
_EXTRAS = ("losses", "checkpoints", "command")
# Never installed: the machine's own are used, which may have one of these names.
_OWN = {
    "numpy": ("numpy",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "torch": ("torch",),
}
# Nothing runs without these. Without another one, some tests are skipped, or a phase is left out.
_NEEDED_BY_ALL = ("numpy", "ml_dtypes", "cupy")
_OPERATORS = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
# pip takes a wheel only if its platform is among those that are named.
_PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="installs missing packages here")
    parser.add_argument("--wheels", type=Path, help="a folder that --fetch has filled")
    parser.add_argument("--fetch", type=Path, metavar="WHEELS", help="fill this folder instead")
    parser.add_argument(
        "--python",
        default=".".join(map(str, sys.version_info[:2])),
        help="the version of the machine's Python, to fetch for (default: %(default)s)",
    )
    options = parser.parse_args()
    if sys.version_info < _OLDEST_PYTHON:
        parser.error(f"needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    if (options.folder is None) == (options.fetch is None):
        parser.error("give either FOLDER or --fetch WHEELS")
    if options.fetch is not None:
        return fetch(options.fetch, options.python)
    return bring(options.folder, options.wheels)


def requirements() -> list[str]:
    """Lists the requirements of gpuopt and of its tests on a GPU, from pyproject.toml."""
    settings = _settings()
    of_tests = settings["dependency-groups"]["test"]
    chosen = [each for each in of_tests if _name_of(each) in _FOR_TESTS]
    project = settings["project"]
    extras = map(project["optional-dependencies"].__getitem__, _EXTRAS)
    return [*project["dependencies"], *chain(*extras), *chosen]


def requirements_of_the_machine() -> list[str]:
    """Lists the requirements that are never installed, CuPy's and torch's, from pyproject.toml."""
    extras = _settings()["project"]["optional-dependencies"]
    [cupy] = extras["cuda13"]
    bounds = re.sub(r"^[^>]*|;.*", "", cupy)
    return [f"cupy{bounds}", *(each for each in extras["bench"] if _name_of(each) == "torch")]


def fetch(folder: Path, python: str) -> int:
    """Downloads wheels of the requirements and of their own requirements, but not numpy's.

    Returns:
        pip's status.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    status = subprocess.run([*command, "--dest", str(folder), *requirements()]).returncode
    for wheel in folder.glob("numpy-*.whl"):
        wheel.unlink()
    print(*sorted(wheel.name for wheel in folder.glob("*.whl")), sep="\n")
    return status


def bring(folder: Path, wheels: Path | None) -> int:
    """Installs the packages that the machine lacks, and prints their list.

    Returns:
        1 if a package without which nothing runs is still missing, too old or too new.
    """
    lines, lacking = [], set()
    for requirement in [*requirements(), *requirements_of_the_machine()]:
        name = _name_of(requirement)
        found = _installed(name)
        if _fits(found, requirement):
            continue
        brought = ""
        if wheels is not None and name not in _OWN:
            brought = f"; {_bring(folder, wheels, requirement)}"
        lines.append(f"  {requirement}: {f'{found} is' if found else 'not'} here{brought}")
        if not brought.startswith("; brought"):
            lacking.add(name)
    if find_sanitizer() is None:
        lines.append("  compute-sanitizer: not here")
    print("missing, too old or too new on this machine:" if lines else "nothing is missing")
    print("".join(f"{line}\n" for line in lines), end="")
    return 1 if lacking & set(_NEEDED_BY_ALL) else 0


def find_sanitizer() -> str | None:
    """Returns NVIDIA's checker, from PATH or from beside CUDA's compiler."""
    beside = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
    return shutil.which(
        "compute-sanitizer", path=f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"
    )


def _settings() -> dict[str, Any]:
    import tomllib  # an older Python, which lacks it, is refused in a sentence

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def _installed(name: str) -> str | None:
    for distribution in _OWN.get(name, (name,)):
        try:
            return version(distribution)
        except PackageNotFoundError:
            pass
    return None


def _fits(found: str | None, requirement: str) -> bool:
    if found is None:
        return False
    bounds = re.findall(r"(>=|<|==)\s*([\d.]+)", requirement.partition(";")[0])
    return all(_OPERATORS[sign](_numbers(found), _numbers(bound)) for sign, bound in bounds)


def _numbers(text: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", text)), 0, 0][:3]


def _bring(folder: Path, wheels: Path, requirement: str) -> str:
    """Installs a package with its requirements that the machine lacks; returns the outcome."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-index", "--find-links", str(wheels), "--no-deps", "--upgrade"]
    finished = subprocess.run(
        [*command, "--target", str(folder), requirement], capture_output=True, text=True
    )
    if finished.returncode:
        lines = finished.stderr.splitlines()  # without pip, one that names it
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        return f"not brought: {reasons[-1].removeprefix('ERROR: ')}"
    [installed] = distributions(name=_name_of(requirement), path=[str(folder)])
    for needed in installed.requires or []:
        name = _name_of(needed)
        brought = [each.name for each in distributions(path=[str(folder)])]
        if "extra ==" in needed or name in (*_OWN, *brought) or _fits(_installed(name), needed):
            continue
        # There is no wheel of a requirement for another system.
        if any(re.split("-", file.name)[0] == name.replace("-", "_") for file in wheels.iterdir()):
            _bring(folder, wheels, needed.partition(";")[0].strip())
    return f"brought from {wheels.name}"


if __name__ == "__main__":
    sys.exit(main())
