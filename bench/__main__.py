"""Runs the benchmarks and writes the results."""

from __future__ import annotations

from importlib.util import find_spec

from bench.harness import ROOT, make_parser, report, take_samples, write_results
from bench.workloads import offer_host_workloads
from gpuopt.bench.contenders import compiled_as_now
from gpuopt.bench.machine import measure_copy_bandwidth


def main() -> None:
    parser = make_parser("bench", __doc__, rounds=30)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="names of workloads, as in host_*_16m"
    )
    options = parser.parse_args()
    for peer in ("torch", "optax"):
        if find_spec(peer) is None:
            print(f"{peer} is not installed and does not take part")
    bandwidth = measure_copy_bandwidth()
    measured = {}
    for offer in offer_host_workloads(options.only):
        workload = offer.make()
        with compiled_as_now():
            samples = take_samples(workload, options.rounds)
        measured[offer.name] = report(workload, samples, offer.targets, bandwidth)
    if not options.no_results:
        results = {"copy_gb_per_s": round(bandwidth / 1e9, 2), "workloads": measured}
        print(f"written: {write_results(results).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
