"""Runs the benchmarks on a GPU and writes the results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table

from bench.gpu_first_step import JOBS as FIRST_STEPS
from bench.gpu_harness import Measured, measure
from bench.harness import RESULTS, ROOT, Offer, Workload, write_results
from bench.targets import Verdict, judge
from bench.workloads import GPU, offer_gpu_workloads
from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.bench.clock import Clock, GpuClock, measure_copy_bytes_per_second
from gpuopt.bench.machine import describe_machine
from gpuopt.bench.measure import prepare
from gpuopt.bench.profiler import profile
from gpuopt.bench.report import make_console
from gpuopt.device import Device
from gpuopt.info import describe

# The share of a workload's time that is for making it and for its first steps.
_FOR_MAKING = 0.25


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="time limit for all workloads")
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="names of workloads, as in gpu_adam_*"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="the commit that is measured; by default, asks git")
    parser.add_argument(
        "--no-results", action="store_true", help="print the results, but do not write a file"
    )
    parser.add_argument("--require-gpu", action="store_true", help="fail if there is no GPU")
    options = parser.parse_args()
    console = make_console()
    reason = why_no_gpu()
    if reason is not None:
        console.print(f"nothing was measured: {reason}", highlight=False)
        return 1 if options.require_gpu else 0
    deadline = perf_counter() + options.seconds
    gpu = prepare(Device.parse("gpu:0"))
    copy = measure_copy_bytes_per_second(gpu.place.xp)
    described = {
        "machine": {**describe_machine(), **dict(describe()), "gpu": gpu.name},
        **({} if options.commit is None else {"commit": options.commit}),
        "copy_gb_per_s": round(copy / 1e9, 1),
        "first_steps": measure_first_steps(),
        "targets_are_for": GPU,
    }
    console.print(f"copies reach {copy / 1e9:.0f} GB/s", highlight=False)
    offers = list(offer_gpu_workloads(gpu.place, options.only))
    verdicts, failed = [], False
    for number, offer in enumerate(offers):
        seconds = (deadline - perf_counter()) / (len(offers) - number)
        free = gpu.count_free_bytes()
        try:
            found = run_offer(offer, gpu.clock, copy, (1 - _FOR_MAKING) * seconds, free)
        except Exception as error:  # time on a GPU is scarce: run the other workloads
            console.print_exception()
            found, failed = {"not_run": f"{type(error).__name__}: {error}"}, True
        console.print(make_table(offer.name, found))
        verdicts += found.get("targets", [])
        if not options.no_results:
            results = {**described, "workloads": {offer.name: found}}
            path = write_results(results, gpu.name, options.output)
    for verdict in verdicts:
        console.print(str(verdict), highlight=False)
    if offers and not options.no_results:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return 1 if failed else 0


def run_offer(
    offer: Offer, clock: Clock, copy: float, seconds: float, free: int | None
) -> dict[str, Any]:
    """Makes a workload and measures it; returns its entry in the results."""
    if free is not None and offer.needed_bytes > free:
        gigabytes = offer.needed_bytes / 1e9
        return {"not_run": f"it needs {gigabytes:.0f} GB of memory, and {free / 1e9:.0f} are free"}
    workload = offer.make()
    contenders = measure(workload, clock, copy, seconds)
    verdicts = [judge(target, contenders) for target in offer.targets]
    return {
        "description": workload.description,
        "bytes_moved": workload.bytes_moved,
        "operations": workload.operations,
        "contenders": contenders,
        "left_out": workload.left_out,
        "targets": verdicts,
        "profiles": profile_missed_targets(workload, verdicts, clock),
    }


def profile_missed_targets(
    workload: Workload, verdicts: list[Verdict], clock: Clock
) -> dict[str, Any]:
    """Profiles gpuopt and each contender of a missed target; returns {} if none was missed."""
    missed = [verdict.target for verdict in verdicts if verdict.met is False]
    wanted = {"gpuopt", *(target.against for target in missed)} if missed else set()
    return {
        name: profile(contender, clock, on_gpu=isinstance(clock, GpuClock))
        for name, contender in sorted(workload.contenders.items())
        if name in wanted
    }


def measure_first_steps() -> dict[str, Any]:
    """Times the first steps of two processes: one with no compiled kernels, and the next one."""
    found: dict[str, Any] = {}
    for job in FIRST_STEPS:
        with tempfile.TemporaryDirectory() as folder:
            found[job] = [_measure_first_step(job, folder) for _ in range(2)]
    return found


def _measure_first_step(job: str, folder: str) -> Any:
    finished = subprocess.run(
        [sys.executable, "-m", "bench.gpu_first_step", job],
        cwd=ROOT,
        env={**os.environ, "CUPY_CACHE_DIR": folder},
        capture_output=True,
        text=True,
    )
    return finished.stderr if finished.returncode else json.loads(finished.stdout)


def make_table(name: str, found: Mapping[str, Any]) -> Table:
    """Makes a table of the results of one workload."""
    result = Table(title=f"{name}: {found.get('description', found.get('not_run'))}")
    headings = (
        *("", "device ms", "p10", "p90", "dirty ms", "gpuopt / its", "GB/s", "of copy"),
        *("wall ms", "p10", "p90", "gpuopt / its", "runs ahead"),
    )
    for heading in headings:
        result.add_column(heading, justify="right" if heading else "left")
    contenders: Mapping[str, Measured] = found.get("contenders", {})
    for contender, measured in contenders.items():
        device, wall = measured.device, measured.wall
        result.add_row(
            contender,
            *(f"{ms:.3f}" for ms in (device.median_ms, device.p10_ms, device.p90_ms)),
            "" if measured.device_dirty is None else f"{measured.device_dirty.median_ms:.3f}",
            f"{device.ratio:.2f}",
            f"{device.gb_per_s:.0f}",
            f"{device.share_of_copy:.0%}",
            *(f"{ms:.3f}" for ms in (wall.median_ms, wall.p10_ms, wall.p90_ms)),
            f"{wall.ratio:.2f}",
            "" if measured.runs_ahead is None else str(measured.runs_ahead).lower(),
        )
    if found.get("left_out"):
        result.caption = "; ".join(f"no {name}: {why}" for name, why in found["left_out"].items())
    return result


if __name__ == "__main__":
    sys.exit(main())
