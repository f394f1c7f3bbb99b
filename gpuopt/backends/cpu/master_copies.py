"""What is kept beside float32 master copies in host memory: their values in 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.threads import share_out

Array = np.ndarray[Any, Any]

# At once: short enough that all threads finish at about the same time.
_ELEMENTS = 256 * 1024


def write_copies(plan: DensePlan, limits: CpuLimits, rows: Array | None = None) -> None:
    """Rounds the new values of master copies to the arrays that a plan has beside them.

    Args:
        plan: Of master copies.
        limits: See `CpuLimits`.
        rows: Which rows of the plan's only variable are new; None for all of all variables.
    """
    for (master, _), copy in zip(plan.targets, plan.copies, strict=True):
        if rows is not None:
            copy[rows] = master[rows]
            continue
        height = max(_ELEMENTS * len(np.atleast_1d(copy)) // max(copy.size, 1), 1)

        def write(first: int, master: Array = master, copy: Array = copy, n: int = height) -> None:
            part = slice(first, first + n) if copy.ndim else ...
            np.copyto(copy[part], master[part], casting="unsafe")

        threads = 1 if copy.size < limits.large_elements else limits.threads_for(copy.size)
        share_out(write, range(0, len(np.atleast_1d(copy)), height), threads)
