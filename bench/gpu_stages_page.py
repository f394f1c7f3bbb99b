"""The tables of docs/performance.md about the stages of a step, from their result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.gpu_launches import ACCUMULATED
from bench.gpu_timing import GPUS
from bench.gpu_torch import ALONE, BLOCKS, CHUNK, VERSION
from bench.page import make_table


def make_tables(result: Mapping[str, Any]) -> str:
    """Returns the tables of a result of `bench.gpu_stages`, with a heading and what they show."""
    shapes, alone = result["shapes"], list(ALONE.values())
    return (
        "## Stages of a step, modelled\n\n"
        f"{len(shapes)} tensors of {shapes[0][0]:,} elements, float32; bfloat16 with `bfloat16`, "
        "`masters` and `stochastic_rounding`.\nOur launches are recorded on the driver that is "
        f"not there. With `accumulation` {ACCUMULATED} calls or more make an update, and\neach "
        "row is one call. `cautious` stands for rules that sum over their "
        "step: LAMB reads variables, too.\n\n"
        "In brackets is torch, by those calls of the next table that do the same: the last column "
        "has their numbers. No torch has\nrun for these: its launches, waits and bytes are "
        "counted by what its sources say, and its bytes get the same share of\nthe memory's "
        "bandwidth as ours. Unlike ours, its kernels are taken to wait for nothing else. It has "
        f"no call for\n{', '.join(alone[:-1])} and {alone[-1]}.\n\n"
        f"{_make_table_of_steps(result)}\n"
        "### Torch's calls\n\n"
        f"What each does with these tensors, by the sources of torch {VERSION}. Lists of tensors "
        f"go by chunks of {CHUNK:,} elements,\n{BLOCKS:,} of them in a launch "
        "(`MultiTensorApply.cuh`, for CUDA 13); other launches, and the copies, are of single "
        "numbers.\nBytes are those of the first row above that makes the call.\n\n"
        f"{_make_table_of_calls(result)}"
    )


def _make_table_of_steps(result: Mapping[str, Any]) -> str:
    numbers = {name: number for number, name in enumerate(result["torch_calls"], 1)}
    rows = []
    for name, step in result["steps"].items():
        cells = _cells({**step, "launches": len(step["launches"])}, result)
        called = "none"
        if (torch := result["torch"].get(name)) is not None:
            theirs = _cells(torch, result)
            cells = [f"{our} ({their})" for our, their in zip(cells, theirs, strict=True)]
            called = " ".join(str(numbers[each]) for each in torch["calls"])
        rows.append([name, *cells, called])
    headings = ["Adam with", "launches", "waits", "bytes an element"]
    return make_table([*headings, *(f"{short}, us" for short in GPUS), "torch's calls"], rows)


def _cells(step: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    times = [f"{us:,.0f}" for us in step["modelled_us"].values()]
    return [str(step["launches"]), str(step["waits"]), _per_element(step, result), *times]


def _make_table_of_calls(result: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{number}. {name}",
            *(call["launches"], call["copies"], call["waits"]),
            _per_element(call, result),
            call["source"],
        ]
        for number, (name, call) in enumerate(result["torch_calls"].items(), 1)
    ]
    headings = ["torch's call", "launches", "copies", "waits", "bytes an element", "by"]
    return make_table(headings, rows)


def _per_element(counted: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    return f"{counted['num_bytes'] / sum(map(math.prod, result['shapes'])):g}"
