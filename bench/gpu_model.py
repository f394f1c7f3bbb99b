"""Models the time that steps take on GPUs: a model, never a measurement.

    .venv/bin/python -m bench.gpu_model

The launches are those that real CuPy makes on the tests' driver, which this program records. The
rest is arithmetic (`gpu_timing.py`), from data sheets and from what each kernel does
(`gpu_kernels.py`). The result goes to bench/results/model/gpuopt.json and into the tables of
docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.gpu_kernels import KERNELS, WorkOf
from bench.gpu_kernels_of_29a79d3 import KERNELS_OF_29A79D3
from bench.gpu_launches import Recorded, record
from bench.gpu_model_page import PAGE, REVIEW, make_tables, with_tables
from bench.gpu_modelled import COMMAND, OURS, REVIEWED, WHAT, as_json, compute
from bench.gpu_timing import GPUS
from bench.gpu_work import Data, Dense, Rows
from bench.gpu_workloads import DenseTask, SparseTask, offer_workloads
from bench.harness import ROOT
from gpuopt.bench.jobs import JOBS, Place
from gpuopt.bench.models import draw_lookups

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
        tasks = {name: task for name, task in list_tasks().items() if name in REVIEW}
        write(REVIEWED, tasks, ["H200"], KERNELS_OF_29A79D3, options.reviewed)
    else:
        write(OURS, list_tasks(), list(GPUS), KERNELS, ROOT)
    PAGE.write_text(with_tables(PAGE.read_text()))
    print(make_tables())


def list_tasks() -> dict[str, Task]:
    """Returns the step of each workload of the benchmark, those that need most memory first.

    Another one is `half_one_row`, which the benchmark does not have.
    """
    offers = sorted(offer_workloads(Place(np, "cpu")), key=lambda offer: -offer.needed_bytes)
    tasks = {offer.name: Task(offer.task, data_of(offer.task)) for offer in offers}
    tasks["half_one_row"] = Task(_HALF_ONE_ROW, Rows(2**20, 128, 1, {1: 2**19, 2**19: 1}))
    return tasks


def data_of(task: DenseTask | SparseTask) -> Data:
    """Returns what the model takes of a task."""
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
        "data": {name: as_json(task.data) for name, task in tasks.items()},
        "recorded": {
            f"{multiprocessors} multiprocessors, sm_{architecture}": each._asdict()
            for (multiprocessors, architecture), each in recorded.items()
        },
    }
    path.parent.mkdir(exist_ok=True)
    result["modelled"] = compute(result, gpus, kernels)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
