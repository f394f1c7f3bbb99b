"""Builds the package, and tests it where it is installed and there is no checkout.

It is tested with the newest versions of what it needs on each Python that is here, and on the
oldest Python also with the oldest versions. basedpyright checks a user's program beside each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import run

# Each dependency, and each file that the package has beside its modules, is used by some of these.
TESTS = [
    "tests/optimizers/test_golden.py",
    "tests/backends/cpu/test_library_cache.py",
    "tests/backends/cpu/test_written_memory.py",
    "tests/autodiff/test_autograd_engine.py",
    "tests/checkpoint/test_checkpoint.py",
    "tests/schedules",
    "tests/demo/test_demo.py",
    "tests/bench/test_bench.py",
    "tests/project/test_command_line.py",
    "tests/project/test_info.py",
    "tests/project/test_public_names.py",
    "tests/project/test_typed_program.py",
]
# What the oldest dependencies need, where they do not say that a newer one warns of their calls.
OF_THEIR_TIME = ["pyparsing<3.3"]  # of matplotlib


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status.

    Args:
        arguments: For pytest; those that name tests take the place of `TESTS`.
    """
    tests = [] if run.name_tests(arguments) else TESTS
    pythons = find_pythons()
    parts = [(version, "newest") for version in pythons]
    if run.OLDEST_PYTHON in pythons:
        parts.insert(0, (run.OLDEST_PYTHON, "oldest"))
    statuses = {}
    for version, age in parts:
        name = f"Python {'.'.join(map(str, version))} with the {age} dependencies"
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            python, unpacked = install_built(pythons[version], age == "oldest", Path(folder))
            environment = {**os.environ, "PYTHONPATH": ""}
            command = [python, "-m", "pytest", "-p", "no:cacheprovider", *tests, *arguments]
            statuses[name] = subprocess.run(command, cwd=unpacked, env=environment).returncode
            # What mypy takes for public in a checkout may be private in what is installed.
            command = [str(run.program("basedpyright")), "--pythonpath", python]
            types = subprocess.run(command, cwd=unpacked, env=environment).returncode
            statuses[f"types with {name}"] = types
    if run.OLDEST_PYTHON not in pythons:
        oldest = ".".join(map(str, run.OLDEST_PYTHON))
        print(f"run.py: not tested: the oldest dependencies, which need Python {oldest}")
    return run.report(statuses)


def find_pythons() -> dict[tuple[int, int], str]:
    """Returns the Pythons that are here and new enough, by version: this one, and those in PATH."""
    major, oldest = run.OLDEST_PYTHON
    found = {}
    for minor in range(oldest, oldest + 10):
        python = shutil.which(f"python{major}.{minor}")
        if python is not None and run.works("import venv", python):
            found[major, minor] = python
    return {**found, sys.version_info[:2]: sys.executable}


def install_built(python: str, is_oldest: bool, folder: Path) -> tuple[str, Path]:
    """Builds an sdist of the checkout, and from that the package that it installs, with its tests.

    Args:
        python: For the environment that it is built and installed in.
        is_oldest: Whether it gets the oldest versions that pyproject.toml allows.
        folder: Where all of this is made.

    Returns:
        The environment's Python, and a folder that has the tests, and not the package.
    """
    settings = tomllib.loads((run.ROOT / "pyproject.toml").read_text())
    built_with, project = settings["build-system"]["requires"], settings["project"]
    extras = [*run.EXTRAS, "plots"]
    bounded = [*built_with, *project["dependencies"], *run.requirements(extras)]
    environment, constraints = folder / "venv", folder / "constraints.txt"
    oldest = [*map(oldest_version, bounded), *OF_THEIR_TIME]
    constraints.write_text("\n".join(oldest) if is_oldest else "")
    run.call([python, "-m", "venv", "--without-pip", str(environment)])
    run.install(environment, ["--constraint", str(constraints), *built_with])
    installed = str(run.program("python", environment))
    target = ["--target", "sdist", "--directory", str(folder)]
    run.call([installed, "-m", "hatchling", "build", *target])
    [sdist] = folder.glob("*.tar.gz")
    package = ["--no-build-isolation", f"{sdist}[{','.join(extras)}]", *run.requirements(["test"])]
    run.install(environment, ["--constraint", str(constraints), *package])
    shutil.unpack_archive(sdist, folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    for source in ("gpuopt", "kernels"):
        shutil.rmtree(unpacked / source)
    return installed, unpacked


def oldest_version(requirement: str) -> str:
    """Returns the requirement of the oldest version: that of numpy>=2.0,<3 is numpy==2.0."""
    return requirement.partition(",")[0].replace(">=", "==")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
