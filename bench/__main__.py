"""Runs the benchmarks and writes the results; without --only, those that do not take minutes."""

from __future__ import annotations

from bench.harness import ROOT, make_parser, report, take_samples, write_results
from bench.workloads import offer_host_workloads
from gpuopt.bench.contenders import compiled_as_now
from gpuopt.bench.measure import prepare
from gpuopt.device import Device


def main() -> None:
    options = make_parser("bench", __doc__, 30, only="host_*_16m").parse_args()
    copies = prepare(Device.cpu).measure_copies()
    runs = {}
    for offer in offer_host_workloads(options.only):
        workload = offer.make()
        with compiled_as_now():
            samples = take_samples(workload, options.rounds)
        runs[offer.name] = report(offer.name, workload, samples, offer.targets, copies)
    if not options.no_results:
        print(f"written: {write_results(runs).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
