"""Breaks kernels, backends and steps in one place at a time, and sees whether the tests notice.

    .venv/bin/python tests/support/mutations.py [parts of descriptions]

Each mutant is tested in a copy of the project: as it is, and where that notices nothing, under the
sanitizer that should. Ends with status 1 if one survives that is not explained here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Tests of a file's own, which are run first, and alone under a sanitizer.
OF_FILE = {
    "dense_update.cu": "one_launch or more_chunks",
    "sort_rows.cu": "sorted",
    "sort_few_rows.cu": "sorted",
    "digits.cuh": "sorted",
    "grid.cuh": "sorted",
    "shares.cuh": "sorted",
    "sorted_rows.py": "sorted or any_length or refused",
    "launch_shapes.py": "sorted",
}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        what: Describes the defect.
        file: The file to change.
        old: The text to replace, which occurs once in the file.
        new: The text that replaces it.
        sanitizer: "address" or "thread", if wrong values alone may not show the defect.
        explained: Why no test can notice the defect, if none can.
        tests: The files that should notice it.
        driver: Whether these tests run on the stub driver.
    """

    what: str
    file: str
    old: str
    new: str
    sanitizer: str = ""
    explained: str = ""
    tests: str = "tests/backends/cuda/test_kernels_update.py"
    driver: bool = False


def mutants() -> list[Mutant]:
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [Mutant(**fields) for fields in listed["mutant"]]


def notices(mutant: Mutant, libraries: str) -> str:
    """Returns what noticed the mutant, or "" if nothing did.

    Args:
        mutant: The change.
        libraries: A folder for compiled kernels, which several mutants may share.
    """
    with TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "results")
        shutil.copytree(ROOT, copy, ignore=ignored)
        path = copy / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.what}: {text.count(mutant.old)} places"
        path.write_text(text.replace(mutant.old, mutant.new))
        pytest = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests.split()]
        python = ["tests/support/driver"] if mutant.driver else []
        pytest += ["-m", "gpu and not real_gpu"] if mutant.driver else []
        environment = {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": libraries}
        environment["GPUOPT_FEW_RULES"] = "1"
        is_kernels = mutant.tests == Mutant._field_defaults["tests"]
        own = ["-k", OF_FILE[path.name]] if is_kernels and path.name in OF_FILE else []
        for chosen in [own, []] if own else [[]]:
            if _fails([sys.executable, *python, *pytest, *chosen], copy, environment):
                return "values"
        if mutant.sanitizer:
            sanitized = ["tests/support/emulator/sanitized.py", mutant.sanitizer]
            options = ["--capture=sys", "-p", "no:faulthandler"]
            command = [sys.executable, *sanitized, *pytest, *own, *options]
            if _fails(command, copy, environment):
                return mutant.sanitizer
    return ""


def _fails(command: list[str], folder: Path, environment: dict[str, str]) -> bool:
    try:
        finished = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=600
        )
    except subprocess.TimeoutExpired:
        return True
    return finished.returncode != 0


def main() -> int:
    parts = sys.argv[1:] or [""]
    wanted = [mutant for mutant in mutants() if any(part in mutant.what for part in parts)]
    nothing = Mutant("nothing", "kernels/shared/math.cuh", "#pragma once", "#pragma once")
    survivors = 0
    with TemporaryDirectory() as libraries, ThreadPoolExecutor(os.cpu_count()) as pool:
        if notices(nothing, libraries):
            print("the tests fail as they are")
            return 1
        tried = {pool.submit(notices, mutant, libraries): mutant for mutant in wanted}
        for future in as_completed(tried):
            mutant, noticed = tried[future], future.result()
            if noticed:
                print(f"noticed by {noticed:8} {mutant.what}", flush=True)
            elif mutant.explained:
                print(f"explained           {mutant.what}: {mutant.explained}", flush=True)
            else:
                survivors += 1
                print(f"SURVIVES            {mutant.what}", flush=True)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
