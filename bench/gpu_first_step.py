"""Prints, as JSON, how long the first two steps of a new process take on a GPU.

CuPy keeps compiled kernels in the folder CUPY_CACHE_DIR.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

JOBS = ("adam", "sparse_adagrad")


def main(job: str) -> None:
    import cupy

    folder = Path(os.environ["CUPY_CACHE_DIR"])
    gradient: Any = cupy.ones((1024, 64), dtype=np.float32)
    variable = cupy.ones((1024, 64), dtype=np.float32)
    cupy.cuda.Device().synchronize()

    import gpuopt

    optimizer: gpuopt.Optimizer
    if job == "adam":
        optimizer = gpuopt.AdamOptimizer()
    else:
        optimizer = gpuopt.AdagradOptimizer(0.1)
        gradient = gpuopt.IndexedSlices(gradient, cupy.arange(1024))
    times = []
    before = _count_compiled(folder)
    for _ in range(2):
        started = perf_counter()
        optimizer.apply_gradients([(gradient, variable)])
        cupy.cuda.Device().synchronize()
        times.append(1e3 * (perf_counter() - started))
    print(
        json.dumps(
            {
                "first_step_ms": round(times[0], 3),
                "second_step_ms": round(times[1], 3),
                "compiled": _count_compiled(folder) - before,
            }
        )
    )


def _count_compiled(folder: Path) -> int:
    return len(list(folder.glob("*.cubin")))


if __name__ == "__main__":
    main(sys.argv[1])
