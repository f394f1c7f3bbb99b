"""Runs the benchmarks on a GPU and writes the results."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from bench import first_step
from bench.gpu_harness import measure
from bench.harness import RESULTS, Offer, make_parser, write_results
from bench.targets import is_missed, judge
from bench.workloads import GPU, offer_gpu_workloads
from gpuopt.backends.cuda.availability import why_no_gpu
from gpuopt.bench.clock import Clock, GpuClock
from gpuopt.bench.machine import describe_machine
from gpuopt.bench.measure import prepare
from gpuopt.bench.profiler import profile
from gpuopt.bench.report import make_console, print_reasons, print_run
from gpuopt.bench.results import Copies, Run
from gpuopt.bench.workloads import make_run
from gpuopt.device import Device
from gpuopt.info import describe

# The share of a workload's time that is for making it and for its first steps.
_FOR_MAKING = 0.25
FIRST_STEPS = ("dense", "rows")


def main() -> int:
    parser = make_parser("bench.gpu", __doc__, only="gpu_adam_*")
    parser.add_argument("--seconds", type=float, default=300, help="time limit for all workloads")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="the commit that is measured; by default, asks git")
    parser.add_argument("--require-gpu", action="store_true", help="fail if there is no GPU")
    options = parser.parse_args()
    console = make_console()
    reason = why_no_gpu()
    if reason is not None:
        console.print(f"nothing was measured: {reason}", highlight=False)
        return 1 if options.require_gpu else 0
    deadline = perf_counter() + options.seconds
    gpu = prepare(Device.parse("gpu:0"))
    copies = gpu.measure_copies()
    machine = {
        **{**describe_machine(), **dict(describe()), "gpu": gpu.name, "targets_are_for": GPU},
        "first_steps": measure_first_steps(),
    }
    console.print(f"copies reach {copies.gb_per_s:.0f} GB/s", highlight=False)
    offers = list(offer_gpu_workloads(gpu.place, options.only))
    runs: dict[str, Run] = {}
    not_run: dict[str, str] = {}
    failed = False
    for number, offer in enumerate(offers):
        seconds = (deadline - perf_counter()) / (len(offers) - number)
        free = gpu.count_free_bytes()
        try:
            if (reason := offer.why_not(free)) is not None:
                not_run[offer.name] = reason
            else:
                run = run_offer(offer, gpu.clock, copies, (1 - _FOR_MAKING) * seconds)
                print_run(console, offer.name, run)
                runs[offer.name] = run
        except Exception as error:  # time on a GPU is scarce: run the other workloads
            console.print_exception()
            not_run[offer.name] = f"{type(error).__name__}: {error}"
            failed = True
        if not options.no_results:
            path = write_results(
                runs,
                gpu.name,
                options.output,
                device=gpu.name,
                machine=machine,
                commit=options.commit,
                not_run=not_run,
            )
    print_reasons(console, not_run)
    for line in (line for run in runs.values() for line in run.targets):
        console.print(line, highlight=False)
    if offers and not options.no_results:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    return 1 if failed else 0


def run_offer(offer: Offer, clock: Clock, copies: Copies, seconds: float) -> Run:
    """Makes a workload, measures it and judges it.

    gpuopt, and each contender of a missed target, has the kernels of a step in its figures.

    Args:
        offer: The workload.
        clock: The device's.
        copies: For comparison.
        seconds: The time limit.
    """
    workload = offer.make()
    figures = measure(workload, clock, 1e9 * copies.gb_per_s, seconds)
    run = make_run(workload, figures, copies)
    run.targets.extend(str(judge(target, run)) for target in offer.targets)
    missed = [target for target in offer.targets if is_missed(target, run)]
    for name in {"gpuopt", *(target.against or "gpuopt" for target in missed)} if missed else ():
        if name in figures:
            on_gpu = isinstance(clock, GpuClock)
            kernels = profile(workload.contenders[name], clock, on_gpu)
            run.contenders[name] = replace(figures[name], kernels=kernels)
    return run


def measure_first_steps() -> dict[str, Any]:
    """Times the first steps of two processes: one with no compiled kernels, and the next one."""
    found: dict[str, Any] = {}
    for kind in FIRST_STEPS:
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = [_measure_first_steps(kind, folder) for _ in range(2)]
    return found


def _measure_first_steps(kind: str, folder: str) -> Any:
    try:
        return first_step.run(kind, "gpu:0", folder)
    except subprocess.CalledProcessError as error:
        return error.stderr


if __name__ == "__main__":
    sys.exit(main())
