"""Runs gpuopt's kernels in GPGPU-Sim: simulated, never measured.

    .venv/bin/python -m bench.simulated build
    .venv/bin/python -m bench.simulated run results
    .venv/bin/python -m bench.simulated table

`build` finds the simulator, or fetches and builds it, in the folder GPUOPT_SIMULATOR, or
~/.cache/gpuopt-simulator. `run` takes the names of sets and tasks, and `table` writes what there is
to docs/performance.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bench.harness import ROOT
from bench.simulated.results import PAGE, add, make_tables, with_tables
from bench.simulated.simulate import simulate
from bench.simulated.simulator import SOURCE, build, default_folder, find
from bench.simulated.tasks import SETS, TASKS


def main() -> int:
    options = _parse(sys.argv[1:])
    if options.command == "build":
        print(build(options.folder, options.source).library)
        return 0
    if options.command == "table":
        PAGE.write_text(with_tables(PAGE.read_text()))
        print(make_tables())
        return 0
    return _run(options.names, options.folder)


def names_of(given: list[str]) -> list[str]:
    """Returns the tasks of sets and tasks, each once.

    Raises:
        ValueError: a name is neither.
    """
    unknown = [name for name in given if name not in SETS and name not in TASKS]
    if unknown:
        known = f"sets: {', '.join(SETS)}; tasks: {', '.join(TASKS)}"
        raise ValueError(f"there is no set or task {', '.join(unknown)}; {known}")
    return list(dict.fromkeys(task for name in given for task in SETS.get(name, (name,))))


def _run(given: list[str], folder: Path) -> int:
    simulator = find(folder)
    commit = _commit()
    wrong = []
    for name in names_of(given):
        outcome = simulate(TASKS[name], simulator)
        cycles = sum(launch.cycles for launch in outcome.launches)
        right = outcome.largest_error <= 1
        verdict = "right" if right else f"WRONG, {outcome.largest_error:.3g} of what is allowed"
        print(f"{name}: {cycles:,} simulated cycles, {verdict}", flush=True)
        add(commit, {name: outcome})
        if not right:
            wrong.append(name)
    return 1 if wrong else 0


def _commit() -> str:
    """Returns the last commit that has changed what is simulated."""
    what = ["--", "gpuopt", "kernels"]
    command = ["git", "-C", str(ROOT), "log", "-1", "--abbrev=7", "--format=%h", *what]
    return subprocess.check_output(command, text=True).strip()


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", type=Path, default=default_folder(), help="the simulator's")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="find the simulator, or fetch and build it")
    builder.add_argument("--source", default=SOURCE, help="the repository to clone")
    runner = commands.add_parser("run", help="simulate sets or tasks")
    runner.add_argument("names", nargs="+", metavar="SET_OR_TASK", help=f"sets: {', '.join(SETS)}")
    commands.add_parser("table", help="write docs/performance.md's tables")
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
