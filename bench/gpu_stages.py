"""Counts what a step with stages launches and moves on a GPU, and models how long it takes.

    .venv/bin/python -m bench.gpu_stages

The launches are those that real CuPy makes on the tests' driver; torch's calls for the same are
counted by `bench.gpu_torch`. A model, as `bench.gpu_model` is: nothing is measured. The result goes
to bench/results/model/stages.json and into tables of docs/performance.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import gpu_torch
from bench.gpu_kernels import FLOAT, WorkOf
from bench.gpu_launches import Launch, Recorded, record
from bench.gpu_model_page import PAGE
from bench.gpu_modelled import FOLDER, WHAT
from bench.gpu_stages_page import make_tables
from bench.gpu_timing import COPY_US, ENDS_US, GAP_US, GPUS, Gpu, model_step
from bench.gpu_work import DRAM, L2, SHARED, Dense, Waits, Work
from bench.page import replace_between

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
    "accumulation: the first call": ["accumulation", "first call"],
    "accumulation: a call between": ["accumulation", "call between"],
    "accumulation: the call that updates": ["accumulation"],
    "accumulation, clip_norm, decay: the call that updates": ["accumulation", "clip_norm", "decay"],
    "accumulation, averages: the call that updates": ["accumulation", "averages"],
    "accumulation, loss_scale: the call that updates": ["accumulation", "loss_scale"],
    "accumulation, loss_scale, clip_norm, decay, averages: the call that updates": [
        *("accumulation", "loss_scale", "clip_norm", "decay", "averages")
    ],
    "bfloat16": ["bfloat16"],
    "bfloat16, clip_norm, decay": ["bfloat16", "clip_norm", "decay"],
    "bfloat16, averages": ["bfloat16", "averages"],
    'masters="float32"': ["masters"],
    'masters="float32", clip_norm, decay': ["masters", "clip_norm", "decay"],
    'masters="float32", averages': ["masters", "averages"],
    'masters="float32", loss_scale, clip_norm': ["masters", "loss_scale", "clip_norm"],
    'masters="float32", accumulation: the first call': ["masters", "accumulation", "first call"],
    'masters="float32", accumulation: a call between': ["masters", "accumulation", "call between"],
    'masters="float32", accumulation: the call that updates': ["masters", "accumulation"],
    'masters="remainder"': ["remainders"],
    'masters="remainder", clip_norm, decay': ["remainders", "clip_norm", "decay"],
    'masters="remainder", averages': ["remainders", "averages"],
    'masters="remainder", loss_scale, clip_norm': ["remainders", "loss_scale", "clip_norm"],
    "stochastic_rounding": ["rounding"],
    "stochastic_rounding, clip_norm, decay": ["rounding", "clip_norm", "decay"],
    "stochastic_rounding, averages": ["rounding", "averages"],
    "stochastic_rounding, loss_scale": ["rounding", "loss_scale"],
    "stochastic_rounding, loss_scale, clip_norm, decay, averages": [
        *("rounding", "loss_scale", "clip_norm", "decay", "averages")
    ],
    "slot_bits=8": ["8 bits"],
    "slot_bits=8, clip_norm, decay": ["8 bits", "clip_norm", "decay"],
    "slot_bits=8, averages": ["8 bits", "averages"],
    "slot_bits=8, loss_scale": ["8 bits", "loss_scale"],
    'slot_dtype="bfloat16"': ["slot_dtype"],
    'slot_dtype="bfloat16", clip_norm, decay': ["slot_dtype", "clip_norm", "decay"],
    'slot_dtype="bfloat16", averages': ["slot_dtype", "averages"],
    'slot_dtype="bfloat16", loss_scale': ["slot_dtype", "loss_scale"],
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
_SLOTS = {"Adam": 2, "Lars": 1}
# A byte, and the scale of 256 of them.
_CODE_BYTES = 1 + 4 / 256


def moved(kernel: str) -> Moved:
    """Says what an update moves, or what sums over its variables read, by the kernel's types."""
    function, _, arguments = kernel.partition("<")
    names = re.findall(r"\w+", arguments)
    types = [_BYTES[name] for name in names if name in _BYTES]
    if function.startswith("measure"):
        return _moved_by_measuring(names, types)
    # A type for all, or those of the variable, slots, gradient, and what is beside it.
    var, slot, gradient, *beside = types if len(types) > 1 else types * 3
    of_slots: float = sum(_SLOTS.get(name, 0) for name in names)
    of_slots *= _CODE_BYTES if "coded" in function else slot
    if function.startswith("sum_"):  # a cautious rule's: steps depend on no variable, or average
        return Moved(gradient + of_slots, 0, max(types))
    if "Averaged" in names:  # it is of the whole of a variable that is kept in two parts
        of_slots += FLOAT if "Split" in names else var
    read = gradient + of_slots + var * ("BeginSum" not in names)
    written = var + of_slots + sum(beside)
    if "Copied" not in names:
        read += sum(beside)
    return Moved(read, written, max(types))


def _moved_by_measuring(names: Sequence[str], types: Sequence[int]) -> Moved:
    """Says what is read of gradients and variables, and of sums that gradients are added to.

    Args:
        names: What the kernel is a template of: the rule, if variables are read, and types.
        types: The bytes of types: of the storage, and of what is added, if anything is.
    """
    num_stored, var, gradient = 1, 0.0, types[0]
    if "Mixed" in names:  # the whole of a variable that is kept in two parts
        num_stored, gradient = 3 + ("Copied" in names) + ("Split" in names), types[2]
        var = types[0] + 2 * ("Split" in names)
    elif names[0] not in _BYTES:
        var = types[0]
    given = types[num_stored:]
    return Moved(var + gradient + sum(given), gradient if given else 0, max(types))


def _measure(launch: Launch, data: Dense) -> Work:
    """Of a chunk, the entry of its array; then its packs, pass by pass, and the block's sum."""
    read, written, item_bytes = moved(launch.kernel)
    chunks = launch.arguments["num_chunks"]
    passes = _CHUNK * item_bytes / _PACK / launch.block
    item = L2.and_then(DRAM.times(passes)).and_then(_SUM_OF_BLOCK)
    return Work(data.elements * (read + written), 0, chunks, 1, L2, item, L2.and_then(DRAM), item)


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
        num_bytes = data.elements * (read + written)
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
    "sum_coded_terms": _update(_ENTRY_AND_SCALARS, begin=_MAP, after=_SUMS),
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


def record_steps(
    gpu: Gpu,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    steps: Mapping[str, Sequence[str]] = STEPS,
    *,
    compiles: bool = True,
) -> Recorded:
    """Records a step of each; without resources if kernels are not to be compiled."""
    tasks = {
        name: {"job": "adam", "shapes": shapes, "num_sets": 1, "stages": list(stages)}
        for name, stages in steps.items()
    }
    return record(tasks, gpu.multiprocessors, gpu.architecture if compiles else None)


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


def model_torch(counted: gpu_torch.Counted, gpu: Gpu) -> float:
    """Returns microseconds: all bytes as quickly as ours, and each launch's own time."""
    seconds = counted.num_bytes / (gpu.bytes_per_second * gpu.share)
    return counted.launches * (GAP_US + ENDS_US) + counted.copies * COPY_US + 1e6 * seconds


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
    torch: dict[str, dict[str, Any]] = {}
    of_calls: dict[str, dict[str, Any]] = {}
    for name, stages in STEPS.items():
        calls = gpu_torch.calls_for(stages)
        if calls is None:
            continue
        of_step = gpu_torch.count(calls, SHAPES)
        us = {short: round(model_torch(of_step, gpu), 1) for short, gpu in GPUS.items()}
        names = [call.name for call in calls]
        torch[name] = {"calls": names, **of_step._asdict(), "modelled_us": us}
        for call in calls:
            of_call = {"source": call.source, **gpu_torch.count([call], SHAPES)._asdict()}
            of_calls.setdefault(call.name, of_call)
    return {
        "what": WHAT,
        "made_by": COMMAND,
        "shapes": SHAPES,
        "steps": steps,
        "torch": torch,
        "torch_calls": of_calls,
    }


def main() -> None:
    result = compute()
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(replace_between(PAGE.read_text(), COMMAND, make_tables(result)))
    print(make_tables(result))


if __name__ == "__main__":
    main()
