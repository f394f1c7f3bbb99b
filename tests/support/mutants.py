"""Mutates functions of gpuopt, one at a time, and reports the mutants that no test notices.

    make mutants ARGS="PACKAGE ..."

cosmic-ray makes the mutants, in a copy of the project. The tests in tests/PACKAGE run first, and
all others if these pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).resolve().parents[2]
ROOT_MODULES = "gpuopt"
# Has the number of the process that runs tests: it does not get the terminal's Ctrl-C.
PROCESS = Path("tests.pid")
# Types are joined by `|`, and never evaluated; equal values are often the same object; floats have
# no operators of bits.
EXCLUDED = re.compile(
    r"core/Replace(BinaryOperator_(BitOr_.*|.*_(Bit.*|.Shift))"
    r"|ComparisonOperator_(Eq_Is|Is_Eq|NotEq_IsNot|IsNot_NotEq))"
)
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
PYTEST += ["-n", "auto", "--maxprocesses", "8", "--dist", "worksteal", "-m", "not nvrtc"]
# A test that hangs fails.
PYTEST += ["-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true"]


def mutations_of(package: str) -> list[MutationSpec]:
    """Returns the mutations of everything in a function or class."""
    pattern = "*.py" if package == ROOT_MODULES else f"{package}/**/*.py"
    with use_db(":memory:", WorkDB.Mode.create) as session:
        init(sorted(Path("gpuopt").glob(pattern)), session, {})
        found = [each for item in session.work_items for each in item.mutations]
    return [
        each
        for each in found
        if each.definition_name and not EXCLUDED.fullmatch(each.operator_name)
    ]


def draw(mutations: list[MutationSpec], number: int) -> Iterator[MutationSpec]:
    """Draws functions, and one mutation of each: its place first, then its operator.

    Digests stand in for random numbers, so that a change of one function leaves the others drawn.
    """
    by_function = defaultdict(list)
    for each in mutations:
        by_function[str(each.module_path), each.definition_name].append(each)
    for function in sorted(by_function, key=digest)[:number]:
        choices = by_function[function]
        first = min(each.start_pos[0] for each in choices)
        yield min(
            choices,
            key=lambda each: (
                digest((*function, each.start_pos[0] - first, each.start_pos[1])),
                digest((*function, each.operator_name)),
            ),
        )


def digest(parts: tuple[object, ...]) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def command_of_tests(package: str, options: list[str]) -> str:
    own = f"tests/{package}"
    commands = [[own]] if Path(own).is_dir() else []
    commands += [["tests", f"--ignore={own}"]]
    joined = " && ".join(shlex.join([*PYTEST, *options, *each]) for each in commands)
    return shlex.join(["sh", "-c", f"echo $$ > {PROCESS}; {joined}"])


@contextmanager
def copy_of_project() -> Iterator[None]:
    """Makes a copy of the project the working directory, and ends tests that still run there."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        try:
            yield
        finally:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.killpg(int(PROCESS.read_text()), signal.SIGKILL)
            os.chdir(ROOT)


def time_limit(options: list[str]) -> float:
    """Runs the tests without a mutant; returns how many seconds those of a mutant may take."""
    started = time.monotonic()
    outcome, output = run_tests(command_of_tests(ROOT_MODULES, options), None)
    PROCESS.unlink()
    if outcome != TestOutcome.SURVIVED:
        sys.exit(f"{output}\nmutants.py: the tests fail as they are")
    return 60 + 3 * (time.monotonic() - started)


def reports(package: str, number: int, command: str, limit: float) -> Iterator[dict[str, Any]]:
    """Yields the report on a package after each mutant."""
    noticed: list[dict[str, Any]] = []
    survivors: list[dict[str, Any]] = []
    for mutation in draw(mutations_of(package), number):
        result = mutate_and_test([mutation], command, limit)
        PROCESS.unlink()
        place = {
            "file": str(mutation.module_path),
            "line": mutation.start_pos[0],
            "function": mutation.definition_name,
            "diff": result.diff.splitlines()[1:],
        }
        if result.test_outcome == TestOutcome.KILLED:
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", result.output, re.MULTILINE)
            noticed.append({**place, "by": found[1] if found else result.output[-200:]})
        elif result.test_outcome == TestOutcome.SURVIVED:
            survivors.append(place)
        else:
            sys.exit(f"{result.output}\nmutants.py: not tried: {place}")
        score = round(len(noticed) / (len(noticed) + len(survivors)), 3)
        print(f"{package}: {score:.0%} noticed", *list(place.values())[:3], flush=True)
        yield {"score": score, "survivors": survivors, "noticed": noticed}


def main() -> None:
    packages = sorted(path.parent.name for path in ROOT.glob("gpuopt/*/__init__.py"))
    packages.insert(0, ROOT_MODULES)
    parser = argparse.ArgumentParser(description="Reports the mutants that no test notices.")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(packages))
    parser.add_argument("--functions", type=int, default=40, help="to draw of each package")
    parser.add_argument("--json", default="mutants.json", help="the report")
    parser.add_argument("--pytest", type=shlex.split, default=[], help='options, like "-m value"')
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - set(packages):
        parser.error(f"not packages of gpuopt: {', '.join(sorted(unknown))}")
    path, report = Path(arguments.json).resolve(), {}
    with copy_of_project():
        limit = time_limit(arguments.pytest)
        for package in arguments.packages or packages:
            command = command_of_tests(package, arguments.pytest)
            for so_far in reports(package, arguments.functions, command, limit):
                report[package] = so_far
                path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
