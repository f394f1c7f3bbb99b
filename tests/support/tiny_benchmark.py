"""Runs bench.gpu with tiny sizes, to try it on the stub driver."""

from __future__ import annotations

import sys
from functools import partial

import bench.gpu
from bench import gpu_harness
from bench.workloads import Sizes, offer_gpu_workloads
from gpuopt.bench.clock import measure_copy_bytes_per_second

MANY = {"1000x1024": (7, 5), "10000x64": (20, 3)}
TINY = Sizes(64, MANY, (50, 4), 30, tables=(40, 4), lookups_of_each=20, divisor=64)


def main() -> int:
    gpu_harness._MOST_SAMPLE_MS = 1.0
    bench.gpu.offer_gpu_workloads = partial(offer_gpu_workloads, sizes=TINY)
    bench.gpu.FIRST_STEPS = bench.gpu.FIRST_STEPS[:1]
    copy = partial(measure_copy_bytes_per_second, num_bytes=2**16, rounds=3)
    bench.gpu.measure_copy_bytes_per_second = copy
    return bench.gpu.main()


if __name__ == "__main__":
    sys.exit(main())
