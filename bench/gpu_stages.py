"""Counts what a step with stages launches and moves on a GPU, and models how long it takes.

    .venv/bin/python -m bench.gpu_stages

The launches are those that real CuPy makes on the tests' driver. Torch's are not recorded: they are
counted by what its sources say of its calls. A model, as `bench.gpu_model` is: nothing is measured.
The result goes to bench/results/model/stages.json and into a table of docs/performance.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.gpu_kernels import FLOAT, WorkOf
from bench.gpu_launches import ACCUMULATED, Launch, Recorded, record
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import FOLDER, WHAT
from bench.gpu_timing import ENDS_US, GAP_US, GPUS, Gpu, model_step
from bench.gpu_work import DRAM, L2, SHARED, Dense, Waits, Work
from bench.page import make_table, replace_between

COMMAND = ".venv/bin/python -m bench.gpu_stages"
RESULT = FOLDER / "stages.json"

# Of one type, in tensors of one size.
SHAPES = [(40_000_000,)] * 4
ELEMENTS = sum(map(math.prod, SHAPES))
DATA = Dense(ELEMENTS, slots=2)
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
    "cautious": ["cautious"],
    "cautious, clip_norm": ["cautious", "clip_norm"],
    "accumulation": ["accumulation"],
    "accumulation, clip_norm, decay": ["accumulation", "clip_norm", "decay"],
    'masters="float32"': ["masters"],
    'masters="float32", clip_norm, decay': ["masters", "clip_norm", "decay"],
    'masters="float32", loss_scale, clip_norm': ["masters", "loss_scale", "clip_norm"],
    'masters="remainder"': ["remainders"],
    'masters="remainder", clip_norm, decay': ["remainders", "clip_norm", "decay"],
    'masters="remainder", loss_scale, clip_norm': ["remainders", "loss_scale", "clip_norm"],
    "stochastic_rounding": ["rounding"],
    "stochastic_rounding, clip_norm, decay": ["rounding", "clip_norm", "decay"],
    "slot_bits=8": ["8 bits"],
    "slot_bits=8, clip_norm, decay": ["8 bits", "clip_norm", "decay"],
}

# An array is read in chunks of 16,384 elements by 256 threads, 16 bytes at once.
_CHUNK, _PACK = 16384, 16
_CODES_OF_LANE = 8
_SUM_OF_BLOCK = SHARED.times(8)


class Moved(NamedTuple):
    """What an update moves of an element, in bytes.

    Attributes:
        read: Of the gradient, the variable, and slots.
        written: Of the variable, slots, and what is beside the variable.
        widest: Of its types: packs have as many elements as fit of it.
    """

    read: float
    written: float
    widest: int


# By their names in C++; what is kept beside a variable is read unless it is a copy.
_BYTES = {"float": 4, "__nv_bfloat16": 2, "Split": 2}
_SLOTS = {"Adam": 2, "Lars": 1, "BeginSum": 0, "AddToSum": 0}
# A byte, and the scale of 256 of them.
_CODE_BYTES = 1 + 4 / 256


def moved(kernel: str) -> Moved:
    """Says what an update moves, or what sums over its variables read, by the kernel's types."""
    function, _, arguments = kernel.partition("<")
    names = re.findall(r"\w+", arguments)
    slots = sum(_SLOTS.get(name, name == "Averaged") for name in names)
    types = [_BYTES[name] for name in names if name in _BYTES]
    # A type for all, or those of the variable, slots, gradient, and what is beside it.
    var, slot, gradient, *beside = types if len(types) > 1 else types * 3
    of_slots = slots * (_CODE_BYTES if "coded" in function else slot)
    if function.startswith("measure_inputs"):
        of_slots = 0
    read = gradient + of_slots + var * ("BeginSum" not in names)
    written = var + of_slots + sum(beside)
    if "Copied" not in names:
        read += sum(beside)
    return Moved(read, written, max(types))


def _measure(launch: Launch, data: Dense) -> Work:
    """Of a chunk, the entry of its array; then its packs, pass by pass, and the block's sum."""
    item_bytes = moved(launch.kernel).widest
    chunks = launch.arguments["num_chunks"]
    passes = _CHUNK * item_bytes / _PACK / launch.block
    item = L2.and_then(DRAM.times(passes)).and_then(_SUM_OF_BLOCK)
    return Work(data.elements * item_bytes, 0, chunks, 1, L2, item, L2.and_then(DRAM), item)


def _update(before_data: Waits, *, begin: Waits = L2, after: Waits | None = None) -> WorkOf:
    """The work of updates, and of kernels that read what they read; see `moved`.

    Args:
        before_data: What comes before a chunk's data: its entry, and scalars.
        begin: See `Work`.
        after: What a kernel does after a chunk that writes nothing; None if it updates the chunk.
    """

    def work(launch: Launch, data: Dense) -> Work:
        read, written, widest = moved(launch.kernel)
        chunks = launch.arguments["num_chunks"]
        is_coded = "coded" in _name(launch)
        at_once = launch.block * (_CODES_OF_LANE if is_coded else _PACK // widest)
        passes = math.ceil(data.elements / chunks / at_once)
        item = before_data.and_then(DRAM.times(passes)).and_then(after or Waits())
        num_bytes = data.elements * (read + written * (after is None))
        return Work(num_bytes, 0, chunks, 1, begin, item, before_data.and_then(DRAM), item)

    return work


# Scalars come from a table besides, which is in L2.
_ENTRY, _ENTRY_AND_SCALARS = L2, L2.times(2)
# The chunk's sum, the count of the variable's chunks, and their sums.
_SUMS = _SUM_OF_BLOCK.and_then(L2.times(3)).and_then(_SUM_OF_BLOCK)
# A block first copies the map of codes.
_MAP = L2.and_then(SHARED)
KERNELS_OF_STAGES: Mapping[str, WorkOf] = {
    "measure": _measure,
    "measure_and_decide": _measure,
    "measure_inputs": _update(_ENTRY, after=_SUMS),
    "measure_inputs_and_decide": _update(_ENTRY, after=_SUMS),
    "dense_update": _update(_ENTRY),
    "dense_update_of_groups": _update(_ENTRY_AND_SCALARS),
    "dense_update_by_sums": _update(_ENTRY_AND_SCALARS),
    "sum_terms": _update(_ENTRY_AND_SCALARS, after=_SUMS),
    "coded_update": _update(_ENTRY_AND_SCALARS, begin=_MAP),
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


def record_steps(gpu: Gpu) -> Recorded:
    tasks = {
        name: {"job": "adam", "shapes": SHAPES, "num_sets": 1, "stages": list(stages)}
        for name, stages in STEPS.items()
    }
    return record(tasks, gpu.multiprocessors, gpu.architecture)


def count(launches: Sequence[Launch]) -> Counted:
    kernels = [each for each in launches if not each.copied_bytes]
    works = [KERNELS_OF_STAGES[_name(each)](each, DATA) for each in kernels]
    names = [_name(each) for each in kernels]
    # What a GPU has decided comes back in later steps: the host asks, and does not wait.
    comes_back_later = any(name.endswith("_and_decide") for name in names)
    waits = sum(each.kernel == "device to host" for each in launches) - comes_back_later
    num_bytes = sum(work.num_bytes for work in works)
    return Counted(names, waits, round(num_bytes))


def _name(launch: Launch) -> str:
    return launch.kernel.partition("<")[0]


# Torch's calls, in float32: not recorded, but counted by what torch's sources say. Its lists of
# tensors go by chunks of 65,536 elements, 320 of them in a launch, of as many tensors as a launch's
# arguments hold (ATen/native/cuda/MultiTensorApply.cuh).
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
    of_kinds: dict[tuple[int, str], Recorded] = {}
    for short, gpu in GPUS.items():
        kind = gpu.multiprocessors, gpu.architecture
        recorded = of_kinds.get(kind) or of_kinds.setdefault(kind, record_steps(gpu))
        for name in STEPS:
            launches = recorded.launches[name]
            counted = count(launches)
            modelled = model_step(launches, DATA, gpu, recorded.resources, KERNELS_OF_STAGES)
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
        f"{len(SHAPES)} tensors of {SHAPES[0][0]:,} elements, float32; bfloat16 with `masters` and "
        "`stochastic_rounding`. Our launches are\nrecorded on the driver that is not there. "
        f"`accumulation` adds up the gradients of {ACCUMULATED} calls, and the row is for both.\n"
        "`cautious` stands for all rules that sum over a variable.\n\n"
        "In brackets `clip_grad_norm_(foreach=True)`, `AdamW(fused=True)` and `_foreach_lerp_` of "
        "torch. No torch has run for these\nnumbers: its launches and bytes are counted by what "
        "its sources say of how such calls divide lists of tensors\n(`MultiTensorApply.cuh`), and "
        "get the same share of the memory's bandwidth as ours.\n\n" + table
    )


def main() -> None:
    result = compute()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_between(PAGE.read_text(), COMMAND, make_stages_table(result)))
    print(make_stages_table(result))


if __name__ == "__main__":
    main()
