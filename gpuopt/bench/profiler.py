"""The CUDA calls and kernels of a step.

gpuopt tells of its own launches and waits. Those of others are seen by torch's profiler, CuPy's
too. It would not see gpuopt's waits: they ask an event again and again, so that Ctrl-C ends them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from gpuopt.backends import launch_observer
from gpuopt.bench.clock import Clock, Step

_MOST_ROWS = 12
# While a step's waits are counted, the GPU is kept busy for so long that it is behind at each.
_HELD_MS = 50.0


class Calls(NamedTuple):
    """What a step asks of a GPU.

    Attributes:
        launches: How many kernels it launches.
        waits: How often the host waits for the GPU.
    """

    launches: int
    waits: int


def profile(step: Step, clock: Clock, on_gpu: bool = True) -> list[dict[str, Any]] | str:
    """Runs one step under the profiler.

    Returns:
        The kernels that took most time, the longest first: name, number of calls, and microseconds
        of all calls. If there is no profile, the reason.
    """
    seen = _record(step, clock, on_gpu)
    if isinstance(seen, str):
        return seen
    quantity = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(seen, key=lambda row: -getattr(row, quantity))
    return [
        {"name": row.key, "calls": row.count, "us": round(getattr(row, quantity), 1)}
        for row in rows[:_MOST_ROWS]
    ]


def count_our_calls(step: Step, clock: Clock) -> Calls:
    """Counts the launches and waits of one step of gpuopt's on a GPU."""
    counter = _Counter()

    def observed() -> None:
        with launch_observer.observed_by(counter):
            step()

    clock.device_ms(observed, _HELD_MS)
    return Calls(counter.launches, counter.waits)


def count_calls(step: Step, clock: Clock) -> Calls | str:
    """Counts the launches and waits of one step on a GPU; or returns why they are not counted."""
    seen = _record(step, clock, on_gpu=True)
    if isinstance(seen, str):
        return seen
    return sum_calls({row.key: row.count for row in seen})


class _Counter:
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.launches = self.waits = 0

    def note_launch(self, device: str, name: str, read_ms: Callable[[], float]) -> None:
        self.launches += 1

    def note_wait(self) -> None:
        self.waits += 1


def sum_calls(counts: Mapping[str, int]) -> Calls | str:
    """Sums up the calls of CUDA's runtime and driver by their names.

    Args:
        counts: How often each function was called, and each kernel ran, in a step that one wait
            for the device follows.

    Returns:
        The sums; or what is missing, where the profiler saw no wait.
    """
    launches = sum(count for name, count in counts.items() if "LaunchKernel" in name)
    waits = sum(count for name, count in counts.items() if name.endswith("Synchronize"))
    if waits == 0:
        return "torch's profiler sees no calls of CUDA here"
    return Calls(launches, waits - 1)


def _record(step: Step, clock: Clock, on_gpu: bool) -> list[Any] | str:
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
    return list(seen.key_averages())
