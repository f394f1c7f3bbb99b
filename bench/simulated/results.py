"""Results of simulations: bench/results/gpgpu-sim-*/, and what docs/performance.md says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness import RESULTS, ROOT
from bench.page import make_table, replace_between
from bench.simulated.simulate import Outcome
from bench.simulated.simulator import COMMIT, CONFIG, DRAM_BYTES_PER_CYCLE
from bench.simulated.statistics import Simulated
from bench.simulated.tasks import COPIES, SETS

PATH = RESULTS / f"gpgpu-sim-{CONFIG}" / "gpuopt.json"
PAGE = ROOT / "docs" / "performance.md"
COMMAND = ".venv/bin/python -m bench.simulated table"
_WHAT = "Simulated by GPGPU-Sim. Nothing in this file was measured."

# What a prototype found of commit 29a79d3 in the same configuration, in cycles: a review's figures.
_REVIEW = {
    "`adam_2500x64_packed`": 62_373,
    "`adam_524288`": 115_953,
    "sort and runs": 31_933,
    "`sum_pieces`": 33_254,
    "`sparse_update`": 158_954,
}
# The most cycles; of `adam_524288`, as many as a copy's speed of 75 % allows.
_LIMITS = {"`adam_2500x64_packed`": 26_000, "sort and runs": 25_000, "`sparse_update`": 158_954}
_LEAST_OF_COPY = 0.75
# These find runs, too: `sum_pieces` and `sparse_update` do so themselves.
_SORT = ("`check_and_count_digits`", "`count_digits`", "`move_rows`")


def add(commit: str, outcomes: Mapping[str, Outcome]) -> None:
    """Adds to the file, or replaces, what came of tasks.

    Args:
        commit: The last one that had changed gpuopt or its kernels.
        outcomes: By the tasks' names.
    """
    result: dict[str, Any] = {"what": _WHAT, "simulator": f"GPGPU-Sim {COMMIT}, {CONFIG}"}
    result["tasks"] = read()
    for name, outcome in outcomes.items():
        launches = [launch._asdict() for launch in outcome.launches]
        error = round(outcome.largest_error, 3)
        result["tasks"][name] = {"commit": commit, "largest_error": error, "launches": launches}
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(json.dumps(result, indent=1) + "\n")


def read() -> dict[str, Any]:
    """Returns what the file has, by the tasks' names; nothing if it is not there."""
    tasks: dict[str, Any] = json.loads(PATH.read_text())["tasks"] if PATH.exists() else {}
    return tasks


def launches_of(tasks: Mapping[str, Any], name: str) -> list[Simulated]:
    """Returns what there is of a task."""
    return [Simulated(**launch) for launch in tasks[name]["launches"]]


def with_tables(page: str) -> str:
    """Returns the text of docs/performance.md with the tables of the present results."""
    return replace_between(page, COMMAND, make_tables())


def make_tables() -> str:
    """Returns the tables of what has been simulated."""
    tasks = read()
    return "\n".join([_dense(tasks), _limits(tasks), _results(tasks)])


def _dense(tasks: Mapping[str, Any]) -> str:
    rows = []
    for name in _dense_steps(tasks):
        [launch], [copy] = launches_of(tasks, name), launches_of(tasks, COPIES[name])
        cycles = [f"{launch.cycles:,}", f"{copy.cycles:,}", f"{copy.cycles / launch.cycles:.0%}"]
        rows.append([f"`{name}`", *cycles, _share(launch), _share(copy)])
    headings = ["step", "cycles, simulated", "cycles of a copy", "of the copy's speed"]
    headings += ["of memory's bandwidth", "a copy's"]
    return "### Dense steps and copies, simulated\n\n" + make_table(headings, rows)


def _dense_steps(tasks: Mapping[str, Any]) -> list[str]:
    return [name for name, copy in COPIES.items() if name in tasks and copy in tasks]


def _share(launch: Simulated) -> str:
    return f"{launch.dram_bytes / launch.cycles / DRAM_BYTES_PER_CYCLE:.0%}"


def _limits(tasks: Mapping[str, Any]) -> str:
    """What the review asked for, beside what it found."""
    limits: dict[str, float] = dict(_LIMITS)
    cycles = {}
    for name in _dense_steps(tasks):
        [launch], [copy] = launches_of(tasks, name), launches_of(tasks, COPIES[name])
        if f"`{name}`" in _REVIEW:
            cycles[f"`{name}`"] = launch.cycles
            limits.setdefault(f"`{name}`", copy.cycles / _LEAST_OF_COPY)
    for name in SETS["sparse"]:
        if name in tasks:
            cycles |= _parts_of(launches_of(tasks, name))
    rows = []
    for part, found in cycles.items():
        limit, verdict = "", ""
        if part in limits:
            limit = f"{limits[part]:,.0f}"
            verdict = "kept" if found <= limits[part] else "**missed**"
        rows.append([part, f"{_REVIEW[part]:,}", limit, f"{found:,}", verdict])
    headings = ["", "cycles at 29a79d3, simulated", "limit", "cycles, simulated", ""]
    return "### Limits of simulated cycles\n\n" + make_table(headings, rows)


def _parts_of(launches: Sequence[Simulated]) -> dict[str, int]:
    """Returns the cycles of the sort, with the search for runs, and of each later kernel."""
    parts = {"sort and runs": 0}
    for launch in launches:
        kernel = _function(launch)
        part = "sort and runs" if kernel in _SORT else kernel
        parts[part] = parts.get(part, 0) + launch.cycles
    return parts


def _function(launch: Simulated) -> str:
    return f"`{launch.kernel.partition('<')[0]}`"


def _results(tasks: Mapping[str, Any]) -> str:
    rows = [
        [
            f"`{name}`",
            ", ".join(dict.fromkeys(map(_function, launches_of(tasks, name)))),
            f"{tasks[name]['largest_error']:.2f}",
        ]
        for name in SETS["results"]
        if name in tasks
    ]
    headings = ["step", "kernels", "largest error, of what is allowed"]
    return "### Results in the simulator\n\n" + make_table(headings, rows)
