"""Models what a step costs on a GPU whose other rows catch up, beside LazyAdam's.

    .venv/bin/python -m bench.gpu_late_rows

The launches are those that real CuPy makes on the tests' driver. A model, as `bench.gpu_model` is:
nothing is measured. The result goes to bench/results/model/late_rows.json and into a table of
docs/performance.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench.gpu_kernels import FLOAT, KERNELS, WorkOf
from bench.gpu_launches import Launch, Recorded, record
from bench.gpu_model import data_of
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import FOLDER, WHAT
from bench.gpu_timing import GPUS, Gpu, model_step
from bench.gpu_work import DRAM, L2, SHARED, Rows, Work
from bench.gpu_workloads import SparseTask
from bench.page import make_table, replace_between
from gpuopt.rules.catch_up import NUM_SUMS, STRIDE

COMMAND = ".venv/bin/python -m bench.gpu_late_rows"
RESULT = FOLDER / "late_rows.json"

STEPS = {"LazyAdam": False, "catch_up": True}
# Of both. As many digits are sorted as of the benchmark's table, which is ten times as high: the
# driver copies a table that catches up.
_TASK = SparseTask("adam", (1_000_000, 128), 65_536)
# What memory reads and writes at least: the number of steps that a row has made is alone there.
_SECTOR = 32
# Sums are in float64, and so are the powers of a slot's decay.
_DOUBLE = 8
# One for gaps below 256, two for most others.
_POWERS = 2
# Steps that a step of float32 adds itself to; see docs/guides/adam_for_embeddings.md.
_WINDOW = 308


def _late_update(launch: Launch, data: Rows) -> Work:
    """`sparse_update`, of rows that are brought up to date first.

    How many steps a row has made comes with its state. Then come its sums; the sizes of the steps
    to go back by, which are in flight together; and the powers of each slot's decay. The last block
    counts the step: it looks whether it is the last, reads the flag and the count, adds to the sums
    that a step changes, and waits for its threads.
    """
    plain = KERNELS["sparse_update"](launch, data)
    sums = NUM_SUMS * _DOUBLE
    of_row = sums + (STRIDE - 1) / 2 * FLOAT + data.slots * _POWERS * _DOUBLE
    of_count = 3 * sums * _WINDOW / STRIDE  # weights and sums are read, and sums are written
    catching_up = DRAM.and_then(L2.times(2 + data.slots * _POWERS))
    counting = L2.times(3).and_then(SHARED.times(2))
    return plain._replace(
        num_bytes=plain.num_bytes + data.different * 2 * _SECTOR,
        cached_bytes=plain.cached_bytes + data.different * of_row + of_count,
        item=plain.item.and_then(catching_up.times(data.different / data.num_rows)),
        filling=plain.filling.and_then(catching_up),
        longest=plain.longest.and_then(catching_up).and_then(counting),
    )


KERNELS_OF_LATE_ROWS: Mapping[str, WorkOf] = {**KERNELS, "late_update": _late_update}


def data_of_steps() -> Rows:
    """Returns what the model takes of both steps."""
    data = data_of(_TASK)
    assert isinstance(data, Rows)
    return data


def record_steps(gpu: Gpu) -> Recorded:
    tasks = {name: {**_TASK._asdict(), "catch_up": each} for name, each in STEPS.items()}
    return record(tasks, gpu.multiprocessors, gpu.architecture)


def kernels_of(launches: list[Launch]) -> list[str]:
    """Returns the names of the kernels and copies that were launched."""
    return [each.kernel.partition("<")[0] for each in launches]


def compute() -> dict[str, Any]:
    steps: dict[str, dict[str, Any]] = {}
    recorded: dict[tuple[int, str], Recorded] = {}
    for short, gpu in GPUS.items():
        key = gpu.multiprocessors, gpu.architecture
        recorded[key] = recorded.get(key) or record_steps(gpu)
        for name in STEPS:
            launches, resources = recorded[key].launches[name], recorded[key].resources
            modelled = model_step(launches, data_of_steps(), gpu, resources, KERNELS_OF_LATE_ROWS)
            step = steps.setdefault(name, {"launches": kernels_of(launches), "modelled_us": {}})
            step["num_bytes"] = round(sum(each.num_bytes for each in modelled))
            step["modelled_us"][short] = round(sum(each.us for each in modelled), 1)
    return {"what": WHAT, "made_by": COMMAND, "task": _TASK._asdict(), "steps": steps}


def make_late_table(result: Mapping[str, Any]) -> str:
    plain, late = (result["steps"][name] for name in STEPS)
    rows = []
    for name, step in result["steps"].items():
        megabytes = f"{step['num_bytes'] / 1e6:,.1f}"
        rows.append([name, len(step["launches"]), megabytes, *step["modelled_us"].values()])
    ratios = [late["num_bytes"] / plain["num_bytes"]]
    ratios += [late["modelled_us"][short] / plain["modelled_us"][short] for short in GPUS]
    rows.append(["catch_up / LazyAdam", "", *(f"{ratio:.2f}" for ratio in ratios)])
    headings = ["a step", "launches and copies", "MB", *(f"{short}, us" for short in GPUS)]
    height, width = result["task"]["table"]
    return (
        "## Rows that catch up, modelled\n\n"
        f"{result['task']['lookups']:,} rows by Zipf's law of {height:,} x {width}, float32. Every "
        "row is taken to be behind.\n\n" + make_table(headings, rows)
    )


def main() -> None:
    result = compute()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_between(PAGE.read_text(), COMMAND, make_late_table(result)))
    print(make_late_table(result))


if __name__ == "__main__":
    main()
