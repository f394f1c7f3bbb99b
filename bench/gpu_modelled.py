"""The model's results: bench/results/model/, and what follows from them. Nothing is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_kernels import WorkOf
from bench.gpu_launches import Launch, Recorded, Resources
from bench.gpu_timing import GPUS, Modelled, model_step
from bench.gpu_work import Data, Dense, Rows
from bench.harness import RESULTS

FOLDER = RESULTS / "model"
OURS = FOLDER / "gpuopt.json"
REVIEWED = FOLDER / "29a79d3.json"
COMMAND = ".venv/bin/python -m bench.gpu_model"
WHAT = "A model. Nothing in this file was measured."


def as_json(data: Data) -> dict[str, Any]:
    """Returns what `read_data` reads."""
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
