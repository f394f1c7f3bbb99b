"""Runs bench.gpu with tiny sizes, to try it on the stub driver."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import bench.gpu
from bench import gpu_harness
from bench.workloads import offer_gpu_workloads
from gpuopt.bench import measure
from gpuopt.bench.workloads import Task

_MOST_TENSORS, _LONGEST_SIDE = 200, 12
TABLE, LOOKUPS = (50, 4), 30


def make_tiny(task: Task) -> Task:
    if task.lookups:
        return replace(task, shapes=[TABLE] * len(task.shapes), lookups=LOOKUPS)
    shapes = [tuple(min(side, _LONGEST_SIDE) for side in shape) for shape in task.shapes]
    return replace(task, shapes=shapes[:_MOST_TENSORS])


def main() -> int:
    gpu_harness._MOST_SAMPLE_MS = 1.0
    bench.gpu.offer_gpu_workloads = partial(offer_gpu_workloads, resize=make_tiny)
    bench.gpu.FIRST_STEPS = bench.gpu.FIRST_STEPS[:1]
    measure._GPU_COPY_BYTES = 2**16
    return bench.gpu.main()


if __name__ == "__main__":
    sys.exit(main())
