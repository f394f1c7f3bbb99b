"""Counts what a step with stages launches and moves on a GPU, and models how long it takes.

    .venv/bin/python -m bench.gpu_stages

The launches are those that real CuPy makes on the tests' driver, and torch's calls are counted the
same way. A model, as `bench.gpu_model` is: nothing is measured. The result goes to
bench/results/model/stages.json and into a table of docs/performance.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.gpu_kernels import FLOAT, KERNELS, WorkOf, dense
from bench.gpu_launches import Launch, Recorded, record
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import FOLDER, WHAT
from bench.gpu_timing import ENDS_US, GAP_US, GPUS, Gpu, model_step
from bench.gpu_work import DRAM, L2, SHARED, Dense, Work
from bench.page import make_table, replace_between

COMMAND = ".venv/bin/python -m bench.gpu_stages"
RESULT = FOLDER / "stages.json"

# Of one type, in tensors of one size.
SHAPES = [(40_000_000,)] * 4
ELEMENTS = sum(map(math.prod, SHAPES))
# What a step does besides Adam's, by the names that bench/gpu_launches.py knows.
STEPS: Mapping[str, Sequence[str]] = {
    "plain": [],
    "clip_value": ["clip_value"],
    "clip_norm": ["clip_norm"],
    "decay": ["decay"],
    "groups": ["groups"],
    "averages": ["averages"],
    "clip_norm, decay": ["clip_norm", "decay"],
    "clip_norm, groups": ["clip_norm", "groups"],
    "clip_norm, averages": ["clip_norm", "averages"],
    "decay, averages": ["decay", "averages"],
    "clip_value, decay, averages": ["clip_value", "decay", "averages"],
    "clip_norm, decay, averages": ["clip_norm", "decay", "averages"],
    "clip_norm, decay, groups, averages": ["clip_norm", "decay", "groups", "averages"],
    "loss_scale": ["loss_scale"],
    "loss_scale, clip_norm, decay": ["loss_scale", "clip_norm", "decay"],
    "loss_scale, clip_norm, decay, averages": ["loss_scale", "clip_norm", "decay", "averages"],
    "on_nonfinite": ["on_nonfinite"],
    "on_nonfinite, clip_norm, decay, averages": ["on_nonfinite", "clip_norm", "decay", "averages"],
}

# An array is read in chunks of 16,384 elements by 256 threads, 16 bytes at once.
_CHUNK, _PACK = 16384, 16


def _measure(launch: Launch, data: Dense) -> Work:
    """Of a chunk, the entry of its array; then its packs, pass by pass, and the block's sum."""
    chunks = launch.arguments["num_chunks"]
    item = L2.and_then(DRAM.times(_CHUNK * FLOAT / _PACK / launch.block)).and_then(SHARED.times(8))
    return Work(data.elements * FLOAT, 0, chunks, 1, L2, item, L2.and_then(DRAM), item)


KERNELS_OF_STAGES: Mapping[str, WorkOf] = {
    **KERNELS,
    "measure": _measure,
    "measure_and_decide": _measure,
    # Scalars come from a table besides, which is in L2.
    "dense_update_of_groups": dense(begin=L2, before_data=L2.times(2)),
}


class Counted(NamedTuple):
    """What one step does.

    Attributes:
        launches: The kernels, in order.
        waits: How often the host waits: for a copy that comes back.
        num_bytes: What kernels read and write of gradients, variables, slots and averages.
    """

    launches: Sequence[str]
    waits: int
    num_bytes: int


def data_of(stages: Sequence[str]) -> Dense:
    """Returns what the model takes: an average is read and written as a slot is."""
    return Dense(ELEMENTS, 3 if "averages" in stages else 2)


def record_steps(gpu: Gpu) -> Recorded:
    tasks = {
        name: {"job": "adam", "shapes": SHAPES, "num_sets": 1, "stages": list(stages)}
        for name, stages in STEPS.items()
    }
    return record(tasks, gpu.multiprocessors, gpu.architecture)


def count(launches: Sequence[Launch], data: Dense) -> Counted:
    kernels = [each for each in launches if not each.copied_bytes]
    works = [KERNELS_OF_STAGES[_name(each)](each, data) for each in kernels]
    names = [_name(each) for each in kernels]
    # What a GPU has decided comes back in later steps: the host asks, and does not wait.
    comes_back_later = "measure_and_decide" in names
    waits = sum(each.kernel == "device to host" for each in launches) - comes_back_later
    num_bytes = sum(work.num_bytes for work in works)
    return Counted(names, waits, round(num_bytes))


def _name(launch: Launch) -> str:
    return launch.kernel.partition("<")[0]


# Torch's calls, in float32. Its lists of tensors go by chunks of 65,536 elements, 320 of them in a
# launch, of as many tensors as a launch's arguments hold (ATen/native/cuda/MultiTensorApply.cuh).
_TORCH_CHUNK, _TORCH_BLOCKS = 65536, 320


class Call(NamedTuple):
    """A call of torch's.

    Attributes:
        arrays: How many arrays of all elements it reads or writes; each is 4 bytes an element.
        tensors: How many tensors of each list a launch takes.
        others: Launches for single numbers.
    """

    arrays: int
    tensors: int
    others: int


TORCH: Mapping[str, Call] = {
    # Reads; then adds up each tensor's chunks, stacks, takes the norm of norms, adds 1e-6, divides,
    # and clamps.
    "_foreach_norm": Call(1, 110, 6),
    "_foreach_mul_": Call(2, 110, 0),
    # The count of steps is a tensor.
    "AdamW(fused)": Call(7, 36, 1),
    "_foreach_lerp_": Call(3, 64, 0),
}
TORCH_OF: Mapping[str, Sequence[str]] = {
    "decay": ["AdamW(fused)"],
    "clip_norm, decay": ["_foreach_norm", "_foreach_mul_", "AdamW(fused)"],
    "decay, averages": ["AdamW(fused)", "_foreach_lerp_"],
    "clip_norm, decay, averages": list(TORCH),
}


def count_torch(calls: Sequence[str]) -> tuple[int, int]:
    """Returns how many launches calls make, and how many bytes they move."""
    launches = num_bytes = 0
    for name in calls:
        call = TORCH[name]
        chunks = sum(-(-math.prod(shape) // _TORCH_CHUNK) for shape in SHAPES)
        launches += max(-(-chunks // _TORCH_BLOCKS), -(-len(SHAPES) // call.tensors)) + call.others
        num_bytes += call.arrays * ELEMENTS * FLOAT
    return launches, num_bytes


def model_torch(calls: Sequence[str], gpu: Gpu) -> float:
    """Returns microseconds: all bytes as quickly as ours, and each launch's own time."""
    launches, num_bytes = count_torch(calls)
    return launches * (GAP_US + ENDS_US) + 1e6 * num_bytes / (gpu.bytes_per_second * gpu.share)


def compute() -> dict[str, Any]:
    steps: dict[str, dict[str, Any]] = {}
    for short, gpu in GPUS.items():
        recorded = record_steps(gpu)
        for name, stages in STEPS.items():
            data, launches = data_of(stages), recorded.launches[name]
            counted = count(launches, data)
            modelled = model_step(launches, data, gpu, recorded.resources, KERNELS_OF_STAGES)
            step = steps.setdefault(name, {**counted._asdict(), "modelled_us": {}})
            step["modelled_us"][short] = round(sum(each.us for each in modelled), 1)
    torch = {}
    for name, calls in TORCH_OF.items():
        of_calls, num_bytes = count_torch(calls)
        us = {short: round(model_torch(calls, gpu), 1) for short, gpu in GPUS.items()}
        torch[name] = {"launches": of_calls, "num_bytes": num_bytes, "modelled_us": us}
    return {"what": WHAT, "made_by": COMMAND, "shapes": SHAPES, "steps": steps, "torch": torch}


def make_stages_table(result: Mapping[str, Any]) -> str:
    rows = []
    for name, step in result["steps"].items():
        torch = result["torch"].get(name)
        times = [
            f"{us:,.0f}" + (f" ({torch['modelled_us'][short]:,.0f})" if torch else "")
            for short, us in step["modelled_us"].items()
        ]
        per_element = f"{step['num_bytes'] / ELEMENTS:g}"
        launches = str(len(step["launches"]))
        if torch:
            per_element += f" ({torch['num_bytes'] / ELEMENTS:g})"
            launches += f" ({torch['launches']})"
        rows.append([name, launches, step["waits"], per_element, *times])
    headings = ["Adam with", "launches", "waits", "bytes an element"]
    table = make_table([*headings, *(f"{short}, us" for short in GPUS)], rows)
    return (
        "## Stages of a step, modelled\n\n"
        f"{len(SHAPES)} tensors of {SHAPES[0][0]:,} elements, float32. In brackets torch's calls, "
        "which are counted the same way and get\nthe same share of the memory's bandwidth: "
        "`clip_grad_norm_(foreach=True)`, `AdamW(fused=True)`, `_foreach_lerp_`.\n\n" + table
    )


def main() -> None:
    result = compute()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_between(PAGE.read_text(), COMMAND, make_stages_table(result)))
    print(make_stages_table(result))


if __name__ == "__main__":
    main()
