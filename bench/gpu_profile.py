"""Lists the kernels of a step, for a target that was missed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from gpuopt.bench.clock import Clock, Step

_MOST_ROWS = 12


def profile(step: Step, clock: Clock, on_gpu: bool = True) -> list[dict[str, Any]] | str:
    """Runs one step under torch's profiler, which sees all kernels of the process, CuPy's too.

    Returns:
        The kernels that took most time, the longest first: name, number of calls, and microseconds
        of all calls. If there is no profile, the reason.
    """
    if find_spec("torch") is None:
        return "torch, whose profiler is used, is not installed"
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    clock.synchronize()
    try:
        with profiler(activities=[activity]) as seen:
            step()
            clock.synchronize()
    except RuntimeError as error:
        return str(error)
    quantity = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(seen.key_averages(), key=lambda row: -getattr(row, quantity))
    return [
        {"name": row.key, "calls": row.count, "us": round(getattr(row, quantity), 1)}
        for row in rows[:_MOST_ROWS]
    ]
