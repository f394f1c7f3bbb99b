"""Times the host's part of steps on GPUs, on the stub driver.

    .venv/bin/python -m bench.gpu_host

Real CuPy runs on the tests' driver, which leaves kernels out. So this says what the host does in a
step, without what a real driver adds for each launch; and nothing of what a GPU does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.harness import ROOT, write_results
from gpuopt.bench.machine import describe_commit
from gpuopt.bench.models import list_gpt2_shapes, shrink

_DRIVER = ROOT / "tests" / "support" / "driver"
_WORKER = ROOT / "bench" / "gpu_host_worker.py"
# Narrower than they are, because their number counts here, and memory is short.
_GPT2 = shrink(list_gpt2_shapes(), divisor=12)


class _Workload(NamedTuple):
    """A step to time.

    Attributes:
        target_us: The most microseconds that it should take, where commit 29a79d3 took `then_us`.
            On another machine, the same ratio to that commit will do.
        then_us: See `target_us`; None for what that commit had not.
        given: What the worker is given.
    """

    target_us: int
    then_us: int | None
    given: dict[str, Any]


WORKLOADS = {
    "dense_adam_1_tensor": _Workload(40, 73, {"shapes": [(1000,)]}),
    "dense_adam_gpt2": _Workload(60, 103, {"shapes": _GPT2}),
    # The host's part hides behind the GPU's: a step of GPT-2's full shapes moves 3.5 GB.
    "dense_adam_gpt2_40_groups": _Workload(250, None, {"shapes": _GPT2, "num_groups": 40}),
    "dense_adam_gpt2_three_sets": _Workload(150, 216, {"shapes": _GPT2, "num_sets": 3}),
    "dense_adam_10000x64": _Workload(1500, 2900, {"shapes": [(64,)] * 10_000}),
    "sparse_adagrad_64k_rows": _Workload(120, 402, {"num_tables": 1}),
    "sparse_adagrad_26_tables": _Workload(600, 9400, {"num_tables": 26}),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu_host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each workload")
    parser.add_argument("--against", metavar="CHECKOUT", help="another gpuopt, run in turn")
    parser.add_argument("--no-results", action="store_true", help="do not write a file")
    options = parser.parse_args()
    checkouts = {"gpuopt": str(ROOT)}
    if options.against:
        checkouts["against"] = options.against
    table = Table(title="the host's part of a step, microseconds")
    for heading in ("workload", "target", *checkouts, "ratio", "target", "met"):
        table.add_column(heading, justify="right")
    measured = {}
    for workload, (target, then, given) in WORKLOADS.items():
        timed = {"gpuopt": str(ROOT)} if then is None else checkouts
        samples: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(options.rounds):
            for name, checkout in timed.items():
                samples[name].append(median(_in_process(checkout, given)))
        medians = {name: round(median(times), 1) for name, times in samples.items()}
        ratio = medians["gpuopt"] / medians["against"] if "against" in medians else None
        most = None if then is None else round(target / then, 3)
        is_met = medians["gpuopt"] <= target or (
            ratio is not None and most is not None and ratio <= most
        )
        measured[workload] = {
            "description": f"the host's part of {workload}, without a driver's",
            "target_us": target,
            "target_ratio": most,
            "median_us": medians,
            "samples_us": samples,
            "is_met": is_met,
        }
        shown = [str(medians.get(name, "")) for name in checkouts]
        shown.append("" if ratio is None else f"{ratio:.2f}")
        shown.append("" if most is None else f"{most:.2f}")
        table.add_row(workload, str(target), *shown, str(is_met))
    Console().print(table)
    if not options.no_results:
        results = {"against": options.against and describe_commit(Path(options.against))}
        name = "stub driver"
        path = write_results({**results, "workloads": measured}, name=name)
        print(f"written: {path.relative_to(ROOT)}")


def _in_process(checkout: str, given: dict[str, Any]) -> list[float]:
    environment = {
        **os.environ,
        "PYTHONPATH": checkout,
        "GPUOPT_DRIVER_STREAMS": "nothing",
        "GPUOPT_DRIVER_BLOCKS": "plain",
    }
    finished = subprocess.run(
        [sys.executable, str(_DRIVER), str(_WORKER)],
        cwd=ROOT,
        env=environment,
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
