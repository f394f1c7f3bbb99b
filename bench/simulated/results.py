"""Results of simulations: bench/results/gpgpu-sim-*/, and what docs/performance.md says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.harness import RESULTS, ROOT
from bench.page import make_table, replace_between
from bench.simulated.simulate import Outcome
from bench.simulated.simulator import COMMIT, CONFIG, DRAM_BYTES_PER_CYCLE
from bench.simulated.statistics import Simulated
from bench.simulated.tasks import SETS, TASKS, Dense

FOLDER = RESULTS / f"gpgpu-sim-{CONFIG}"
OURS, REVIEWED = "gpuopt", "29a79d3"
PAGE = ROOT / "docs" / "performance.md"
COMMAND = ".venv/bin/python -m bench.simulated table"
_WHAT = "Simulated by GPGPU-Sim. Nothing in this file was measured."
_SORT = (
    "check_and_count_digits",
    "count_digits",
    "move_rows",
    "check_rows",
    "count_runs",
    "write_runs",
)


def add(of: str, commit: str, outcomes: Mapping[str, Outcome]) -> None:
    """Adds to a file, or replaces, what came of tasks.

    Args:
        of: The file's name: whose launches they are.
        commit: Of the gpuopt that made them.
        outcomes: By the tasks' names.
    """
    path = FOLDER / f"{of}.json"
    result: dict[str, Any] = {"what": _WHAT, "simulator": f"GPGPU-Sim {COMMIT}, {CONFIG}"}
    result["tasks"] = read(of)
    for name, outcome in outcomes.items():
        launches = [launch._asdict() for launch in outcome.launches]
        error = round(outcome.largest_error, 3)
        result["tasks"][name] = {"commit": commit, "largest_error": error, "launches": launches}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(of: str) -> dict[str, Any]:
    """Returns what a file has, by the tasks' names; nothing if it is not there."""
    path = FOLDER / f"{of}.json"
    tasks: dict[str, Any] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    return tasks


def launches_of(tasks: Mapping[str, Any], name: str) -> list[Simulated]:
    """Returns what there is of a task."""
    return [Simulated(**launch) for launch in tasks[name]["launches"]]


def with_tables(page: str) -> str:
    """Returns the text of docs/performance.md with the tables of the present results."""
    return replace_between(page, COMMAND, make_tables())


def make_tables() -> str:
    ours, reviewed = read(OURS), read(REVIEWED)
    return "\n".join([_dense(ours), _sparse(ours, reviewed), _results(ours)])


def _dense(ours: Mapping[str, Any]) -> str:
    rows = []
    for name in SETS["dense"]:
        if not isinstance(TASKS[name], Dense) or name not in ours:
            continue
        [launch], [copy] = launches_of(ours, name), launches_of(ours, f"copy_of_{name}")
        rows.append(
            [
                f"`{name}`",
                f"{launch.cycles:,}",
                f"{copy.cycles:,}",
                f"{copy.cycles / launch.cycles:.0%}",
                _share(launch),
                _share(copy),
            ]
        )
    headings = ["step", "simulated cycles", "of a copy", "a copy's speed that it reaches"]
    headings += ["of memory's bandwidth, simulated", "a copy"]
    return "## Dense steps, simulated\n\n" + make_table(headings, rows)


def _share(launch: Simulated) -> str:
    return f"{launch.dram_bytes / launch.cycles / DRAM_BYTES_PER_CYCLE:.0%}"


def _sparse(ours: Mapping[str, Any], reviewed: Mapping[str, Any]) -> str:
    """The chain of a sparse step, beside that of the commit that was reviewed."""
    rows = []
    for name in SETS["sparse"]:
        parts = [_parts_of(launches_of(each, name)) for each in (ours, reviewed) if name in each]
        for part in parts[0]:
            cycles = [f"{each.get(part, 0):,}" for each in parts]
            rows.append([f"`{name}`: {part}", *cycles])
    headings = ["launches", "simulated cycles", f"simulated cycles at {REVIEWED}"]
    return "## A sparse step, simulated\n\n" + make_table(headings, rows)


def _parts_of(launches: list[Simulated]) -> dict[str, int]:
    """Returns the cycles of the sort, with the search for runs, and of each later kernel."""
    parts = {"sort and runs": 0}
    for launch in launches:
        kernel = launch.kernel.partition("<")[0]
        part = "sort and runs" if kernel in _SORT else f"`{kernel}`"
        parts[part] = parts.get(part, 0) + launch.cycles
    return {**parts, "all": sum(parts.values())}


def _results(ours: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{name}`",
            ", ".join(f"`{launch.kernel}`" for launch in launches_of(ours, name)),
            f"{ours[name]['largest_error']:.2f}",
        ]
        for name in SETS["results"]
        if name in ours
    ]
    headings = ["step", "kernels", "largest error, of what is allowed"]
    return "## Results in the simulator\n\n" + make_table(headings, rows)
