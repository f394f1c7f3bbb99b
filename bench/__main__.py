"""Runs the benchmarks and writes the results."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.harness import ROOT, measure, write_results
from bench.targets import judge
from bench.workloads import offer_host_workloads
from gpuopt.bench.contenders import compiled_as_now
from gpuopt.bench.machine import measure_copy_bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=30, help="number of samples of each contender"
    )
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="names of workloads, as in host_*_16m"
    )
    parser.add_argument(
        "--no-results", action="store_true", help="print the results, but do not write a file"
    )
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    console = Console()
    for peer in ("torch", "optax"):
        if find_spec(peer) is None:
            console.print(f"{peer} is not installed and does not take part")
    bandwidth = measure_copy_bandwidth()
    measured: dict[str, dict[str, Any]] = {}
    for offer in offer_host_workloads(options.only):
        workload = offer.make()
        with compiled_as_now():
            timings = measure(workload, options.rounds, bandwidth)
        measured[workload.name] = {
            "description": workload.description,
            "bytes_moved": workload.bytes_moved,
            "operations": workload.operations,
            "contenders": timings,
        }
        verdicts = [judge(target, timings) for target in offer.targets]
        if verdicts:
            measured[workload.name]["targets"] = verdicts
        if workload.peak_extra_bytes is not None:
            measured[workload.name]["peak_extra_bytes"] = workload.peak_extra_bytes
            for name, peak in workload.peak_extra_bytes.items():
                console.print(f"{name} adds {peak / 2**20:.0f} MiB at its peak", highlight=False)
        table = Table(title=workload.description)
        headings = (
            *("", "median ms", "p10", "p90", "gpuopt / its", "numpy / its"),
            *("GB/s", "of copy", "us each"),
        )
        for heading in headings:
            table.add_column(heading, justify="right" if heading else "left")
        for name, timing in timings.items():
            table.add_row(
                name,
                f"{timing.median_ms:.3f}",
                f"{timing.p10_ms:.3f}",
                f"{timing.p90_ms:.3f}",
                f"{timing.ratio:.2f}",
                "" if timing.numpy_ratio is None else f"{timing.numpy_ratio:.2f}",
                "" if timing.gb_per_s is None else f"{timing.gb_per_s:.1f}",
                "" if timing.share_of_copy is None else f"{timing.share_of_copy:.0%}",
                "" if timing.us_per_operation is None else f"{timing.us_per_operation:.2f}",
            )
        console.print(table)
        for verdict in verdicts:
            console.print(str(verdict), highlight=False)
    if not options.no_results:
        results = {"copy_gb_per_s": round(bandwidth / 1e9, 2), "workloads": measured}
        console.print(f"written: {write_results(results).relative_to(ROOT)}", soft_wrap=True)


if __name__ == "__main__":
    main()
