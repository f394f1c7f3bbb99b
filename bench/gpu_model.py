"""Models the time that steps take on GPUs: a model, never a measurement.

    .venv/bin/python -m bench.gpu_model

The launches are those that real CuPy makes on the tests' driver, which this program records. The
rest is arithmetic (`gpu_timing.py`), from data sheets and from what each kernel does
(`gpu_work.py`). The result goes to bench/results/model/gpuopt.json and into the tables of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.gpu_launches import Launch, Recorded, Resources, record
from bench.gpu_peers import JOBS, Place
from bench.gpu_timing import GPUS, Modelled, model_step
from bench.gpu_work import KERNELS, KERNELS_OF_29A79D3, Data, Dense, Rows, WorkOf
from bench.gpu_workloads import DenseTask, SparseTask, offer_workloads
from bench.harness import RESULTS, ROOT
from bench.host_workloads import draw_lookups

FOLDER = RESULTS / "model"
OURS = FOLDER / "gpuopt.json"
REVIEWED = FOLDER / "29a79d3.json"
PAGE = ROOT / "docs" / "performance.md"
COMMAND = ".venv/bin/python -m bench.gpu_model"
WHAT = "A model. Nothing in this file was measured."

# The most microseconds on an H200.
LIMITS = {"gpu_adam_10000x64_same": 10, "gpu_sparse_adagrad": 50, "gpu_sparse_lazyadam": 50}
# What a review of 29a79d3 expected of an H200, in microseconds, with which the model is compared.
REVIEW = {
    "gpu_adam_160m": (1150, 1200),
    "gpu_adam_10000x64_same": (21, 21),
    "gpu_sparse_adagrad": (67, 67),
    "gpu_sparse_lazyadam": (75, 75),
    "half_one_row": (1400, 1400),
}
# Launches of a sparse step that another design would not have: so much could be saved at most.
_AVOIDABLE = {
    "the move by one digit counts the next one": ["count_digits<unsigned int>"],
    "the update finds runs itself": ["count_runs", "write_runs"],
    "the last block of a stretch's pieces sums the stretch": ["sum_stretches"],
    "the first count checks rows": ["check_rows"],
    "the flag of refused rows lies in the host's memory": ["device to host"],
}
_BEGIN, _END = f"<!-- `{COMMAND}` writes from here -->\n\n", "<!-- to here -->\n"
# Half of its rows are the same, the others are all different.
_HALF_ONE_ROW = SparseTask("adagrad", (10_000_000, 128), 2**20)


class Task(NamedTuple):
    """A workload's step.

    Attributes:
        recorded: What `record` takes.
        data: What the model takes.
    """

    recorded: DenseTask | SparseTask
    data: Data


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_model", description=__doc__)
    parser.add_argument(
        "--reviewed", type=Path, metavar="CHECKOUT", help="of 29a79d3: record its launches instead"
    )
    options = parser.parse_args()
    if options.reviewed:
        tasks = list_tasks()
        tasks["half_one_row"] = Task(_HALF_ONE_ROW, Rows(2**20, 128, 1, {1: 2**19, 2**19: 1}))
        tasks = {name: tasks[name] for name in REVIEW}
        write(REVIEWED, tasks, ["H200"], KERNELS_OF_29A79D3, options.reviewed)
    else:
        write(OURS, list_tasks(), list(GPUS), KERNELS, ROOT)
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(make_tables())


def list_tasks() -> dict[str, Task]:
    """Returns the step of each workload of the benchmark; those that need most memory first."""
    offers = sorted(offer_workloads(Place(np, "cpu")), key=lambda offer: -offer.needed_bytes)
    return {offer.name: Task(offer.task, _data_of(offer.task)) for offer in offers}


def _data_of(task: DenseTask | SparseTask) -> Data:
    slots = len(JOBS[task.job].state)
    if isinstance(task, DenseTask):
        return Dense(sum(map(math.prod, task.shapes)), slots)
    return Rows(task.lookups, task.table[1], slots, _draw_runs(task.table[0], task.lookups))


@cache
def _draw_runs(height: int, lookups: int) -> dict[int, int]:
    """Returns how many rows occur how often in the benchmark's sparse gradients."""
    rows, _ = draw_lookups((height, 1), lookups)
    _, occurrences = np.unique(rows, return_counts=True)
    lengths, counts = np.unique(occurrences, return_counts=True)
    return dict(zip(lengths.tolist(), counts.tolist(), strict=True))


def record_tasks(
    tasks: Mapping[str, Task], multiprocessors: int, architecture: str, checkout: Path = ROOT
) -> Recorded:
    """Records a step of each task."""
    workloads = {name: task.recorded._asdict() for name, task in tasks.items()}
    return record(workloads, multiprocessors, architecture, checkout)


def write(
    path: Path,
    tasks: Mapping[str, Task],
    gpus: Sequence[str],
    kernels: Mapping[str, WorkOf],
    checkout: Path,
) -> None:
    """Records the launches of a checkout, and writes them with the times that the model gives."""
    recorded = {
        key: record_tasks(tasks, *key, checkout)
        for key in {(GPUS[name].multiprocessors, GPUS[name].architecture): None for name in gpus}
    }
    result = {
        "what": WHAT,
        "made_by": COMMAND + ("" if checkout == ROOT else " --reviewed CHECKOUT"),
        "data": {name: _as_json(task.data) for name, task in tasks.items()},
        "recorded": {
            f"{multiprocessors} multiprocessors, sm_{architecture}": each._asdict()
            for (multiprocessors, architecture), each in recorded.items()
        },
    }
    path.parent.mkdir(exist_ok=True)
    result["modelled"] = compute(result, gpus, kernels)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _as_json(data: Data) -> dict[str, Any]:
    return {"kind": type(data).__name__, **data._asdict()}


def read_recorded(result: Mapping[str, Any], gpu: str) -> Recorded:
    """Returns what a result has of the launches on a GPU."""
    multiprocessors, architecture = GPUS[gpu].multiprocessors, GPUS[gpu].architecture
    found = result["recorded"][f"{multiprocessors} multiprocessors, sm_{architecture}"]
    return Recorded(
        {name: [Launch(*each) for each in some] for name, some in found["launches"].items()},
        {name: Resources(*each) for name, each in found["resources"].items()},
    )


def read_data(result: Mapping[str, Any], workload: str) -> Data:
    """Returns what a result has of a workload's data."""
    found = dict(result["data"][workload])
    if found.pop("kind") == "Dense":
        return Dense(**found)
    runs = {int(length): count for length, count in found.pop("runs").items()}
    return Rows(runs=runs, **found)


def model_workload(
    result: Mapping[str, Any], gpu: str, workload: str, kernels: Mapping[str, WorkOf]
) -> list[Modelled]:
    """Models each launch of a workload."""
    recorded, data = read_recorded(result, gpu), read_data(result, workload)
    launches = recorded.launches[workload]
    return model_step(launches, data, GPUS[gpu], recorded.resources, kernels)


def compute(
    result: Mapping[str, Any], gpus: Sequence[str], kernels: Mapping[str, WorkOf]
) -> dict[str, dict[str, Any]]:
    """Returns, for each GPU and workload, what the model says of a step."""
    modelled: dict[str, dict[str, Any]] = {}
    for gpu in gpus:
        modelled[gpu] = {}
        for workload in result["data"]:
            steps = model_workload(result, gpu, workload, kernels)
            modelled[gpu][workload] = {
                "us": round(sum(each.us for each in steps), 1),
                "bytes": round(sum(each.num_bytes for each in steps)),
                "launches": len(steps),
                "dependent_loads": round(sum(each.loads for each in steps)),
            }
    return modelled


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def find_model(gpu: str, workload: str) -> dict[str, Any]:
    """Returns what the model says of a workload, to be put beside what was measured.

    Args:
        gpu: The GPU's name, as CUDA gives it.
        workload: The workload's name.

    Returns:
        {"modelled_us": ...}, or {"no_model": the reason}.
    """
    short = next((short for short, each in GPUS.items() if each.name == gpu), None)
    if short is None:
        known = ", ".join(each.name for each in GPUS.values())
        return {"no_model": f"there is no model of {gpu}, only of {known}"}
    found = read(OURS)["modelled"][short].get(workload)
    if found is None:
        return {"no_model": f"the model does not know {workload}: run {COMMAND}"}
    return {"modelled_us": found["us"]}


# ---- Tables


def with_tables(page: str) -> str:
    """Returns the text of docs/performance.md with the tables of the present results."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return before + _BEGIN + make_tables() + "\n" + _END + after


def make_tables() -> str:
    ours, reviewed = read(OURS), read(REVIEWED)
    tables = [_all_workloads(ours), _launches(ours), _limits(ours), _avoidable(ours)]
    return "\n".join([*tables, _review(reviewed)])


def _all_workloads(ours: Mapping[str, Any]) -> str:
    modelled = ours["modelled"]
    gpus = list(modelled)
    rows = []
    for workload, on_h200 in sorted(modelled["H200"].items()):
        times = [_shown(modelled[gpu][workload]["us"]) for gpu in gpus]
        loads, launches = on_h200["dependent_loads"], on_h200["launches"]
        rows.append([f"`{workload}`", f"{on_h200['bytes'] / 1e6:,.1f}", launches, loads, *times])
    headings = ["workload", "MB", "launches and copies", "dependent loads"]
    headings += [f"{gpu}, modelled us" for gpu in gpus]
    return "## Modelled times\n\n" + _table(headings, rows)


def _launches(ours: Mapping[str, Any]) -> str:
    steps = model_workload(ours, "H200", "gpu_sparse_lazyadam", KERNELS)
    rows = [
        [
            each.kernel if each.limit == "copy" else f"`{each.kernel}`",
            f"{each.num_bytes / 1e6:,.2f}",
            round(each.loads),
            f"{each.us:.1f}",
            "" if each.limit == "copy" else each.limit,
        ]
        for each in steps
    ]
    headings = ["launch", "MB", "dependent loads", "H200, modelled us", "what takes the time"]
    return "## One step: `gpu_sparse_lazyadam`\n\n" + _table(headings, rows)


def _limits(ours: Mapping[str, Any]) -> str:
    rows = []
    for workload, limit in LIMITS.items():
        us = ours["modelled"]["H200"][workload]["us"]
        verdict = "kept" if us <= limit else "**missed**"
        rows.append([f"`{workload}`", limit, _shown(us), verdict])
    headings = ["workload", "limit, us", "H200, modelled us", ""]
    return "## Limits\n\n" + _table(headings, rows)


def _avoidable(ours: Mapping[str, Any]) -> str:
    """What the launches take that another design would not have."""
    workloads = [workload for workload in LIMITS if "sparse" in workload]
    steps = [model_workload(ours, "H200", workload, KERNELS) for workload in workloads]
    rows = [
        [
            what,
            *(
                f"{sum(each.us for each in step if each.kernel.startswith(tuple(names))):.1f}"
                for step in steps
            ),
        ]
        for what, names in _AVOIDABLE.items()
    ]
    headings = ["if", *(f"`{workload}` saves at most, modelled us" for workload in workloads)]
    return "## What sparse steps could save\n\n" + _table(headings, rows)


def _review(reviewed: Mapping[str, Any]) -> str:
    rows = []
    for workload, (least, most) in REVIEW.items():
        us = reviewed["modelled"]["H200"][workload]["us"]
        expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        differs = us / ((least + most) / 2) - 1
        rows.append([f"`{workload}`", expected, _shown(us), f"{differs:+.0%}"])
    headings = ["workload", "the review's us", "H200, modelled us", "difference"]
    return "## The model against a review of commit 29a79d3\n\n" + _table(headings, rows)


def _shown(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    main()
