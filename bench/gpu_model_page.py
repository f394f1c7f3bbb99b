"""The tables of docs/performance.md, from the model's results and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.gpu_kernels import KERNELS
from bench.gpu_modelled import COMMAND, OURS, REVIEWED, model_workload, read
from bench.gpu_timing import COPY_US, ENDS_US, GAP_US, GPUS
from bench.gpu_work import DRAM_US, L2_US, SHARED_US
from bench.harness import ROOT
from bench.page import make_table, replace_between

PAGE = ROOT / "docs" / "performance.md"

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
    "the flag of refused rows lies in the host's memory": ["device to host"],
}


def with_tables(page: str) -> str:
    """Returns the text of docs/performance.md with the tables of the present results."""
    return replace_between(page, COMMAND, make_tables())


def make_tables() -> str:
    ours, reviewed = read(OURS), read(REVIEWED)
    tables = [_constants(), _gpus(), _all_workloads(ours), _launches(ours), _limits(ours)]
    return "\n".join([*tables, _avoidable(ours), _review(reviewed)])


def _constants() -> str:
    review = "the review of 29a79d3"
    rows = [
        ["the gap between two kernels of a stream", GAP_US, review],
        ["a dependent load from L2", L2_US, review],
        ["a dependent load from DRAM", DRAM_US, review],
        ["a copy of a few bytes, with its gap", COPY_US, review],
        [
            "a kernel's beginning and end",
            ENDS_US,
            "its parameters and first instructions come from L2, its last stores go there",
        ],
        [
            "a barrier, or a step in shared memory",
            SHARED_US,
            "about 50 cycles: 30 of latency, and what is computed",
        ],
    ]
    return "### Constants\n\n" + make_table(["", "us", "source"], rows)


def _gpus() -> str:
    rows = [
        [
            f"{short} ({gpu.name})",
            f"{gpu.bytes_per_second / 1e12:g}",
            gpu.share,
            f"{gpu.l2_bytes_per_second / 1e12:g}",
            gpu.multiprocessors,
            f"{gpu.most_threads:,}",
            gpu.most_blocks,
        ]
        for short, gpu in GPUS.items()
    ]
    headings = ["GPU", "memory, TB/s", "of it reached", "L2, TB/s", "multiprocessors"]
    return make_table([*headings, "threads of each", "blocks of each"], rows)


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
    return "### Modelled times\n\n" + make_table(headings, rows)


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
    return "### One step: `gpu_sparse_lazyadam`\n\n" + make_table(headings, rows)


def _limits(ours: Mapping[str, Any]) -> str:
    rows = []
    for workload, limit in LIMITS.items():
        us = ours["modelled"]["H200"][workload]["us"]
        verdict = "kept" if us <= limit else "**missed**"
        rows.append([f"`{workload}`", limit, _shown(us), verdict])
    headings = ["workload", "limit, us", "H200, modelled us", ""]
    return "### Limits\n\n" + make_table(headings, rows)


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
    return "### What sparse steps could save\n\n" + make_table(headings, rows)


def _review(reviewed: Mapping[str, Any]) -> str:
    rows = []
    for workload, (least, most) in REVIEW.items():
        us = reviewed["modelled"]["H200"][workload]["us"]
        expected = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        differs = us / ((least + most) / 2) - 1
        rows.append([f"`{workload}`", expected, _shown(us), f"{differs:+.0%}"])
    headings = ["workload", "the review's us", "H200, modelled us", "difference"]
    return "### The model against a review of commit 29a79d3\n\n" + make_table(headings, rows)


def _shown(us: float) -> str:
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"
