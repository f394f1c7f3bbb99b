"""What else slows a machine down while it is timed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

_SYSTEM = Path("/sys")
_PROCESSES = Path("/proc")
# NVML's reasons for lower clocks that come from heat or power, nvmlClocksEventReasons in nvml.h.
_THROTTLED = {
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "heat (by software)",
    0x40: "heat (by hardware)",
    0x80: "the power brake",
}
# A GPU is looked at after each of so many rounds, of which there are five at least.
_ROUNDS_A_LOOK = 5
# Of the CPU's time, what may be lost before it is said.
_MOST_STOLEN = 0.01
# How much slower or faster copies may become in a run.
_MOST_DRIFT = 0.15


def read_counters() -> dict[str, float]:
    """Reads counters that grow while something slows this machine down; {} where there are none."""
    counters = {}
    throttled = _SYSTEM.glob("devices/system/cpu/cpu*/thermal_throttle/core_throttle_count")
    if counts := [int(path.read_text()) for path in throttled]:
        counters["the CPU was throttled by its heat"] = float(sum(counts))
    quota = _read(_SYSTEM / "fs/cgroup/cpu.stat")
    if found := re.search(r"nr_throttled (\d+)", quota):
        counters["the container's quota of CPU time was used up"] = float(found[1])
    if found := re.match(r"cpu +((?:\d+ ?)+)", _read(_PROCESSES / "stat")):
        times = [float(time) for time in found[1].split()]
        if len(times) > 7 and (ticks := os.sysconf("SC_CLK_TCK")):
            counters["stolen seconds"] = times[7] / ticks
    return counters


def compare_counters(
    before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float
) -> list[str]:
    """Says what has slowed this machine down between two calls of `read_counters`."""
    warnings = []
    for name, count in after.items():
        grown = count - before.get(name, count)
        if name == "stolen seconds":
            cpu_s = elapsed_s * (os.cpu_count() or 1)
            if grown > _MOST_STOLEN * cpu_s:
                warnings.append(f"other guests of the host took {grown / cpu_s:.0%} of CPU time")
        elif grown > 0:
            warnings.append(name)
    return warnings


def find_load() -> list[str]:
    """Says whether other programs want this machine's cores, too."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return []
    cores = os.cpu_count() or 1
    if load <= cores:
        return []
    return [f"{load:.1f} programs want {cores} cores"]


class GpuThrottling:
    """What lowers a GPU's clocks while it is timed, by heat or for power.

    Args:
        bus_id: The GPU's address on the PCI bus, as in "0000:65:00.0". nvidia-smi has an order of
            its own for GPUs, and also numbers those that CUDA_VISIBLE_DEVICES hides.
        keep_busy: Does work on the GPU until nvidia-smi has answered: it rests between rounds, and
            an idle GPU is not short of power.
    """

    def __init__(self, bus_id: str, keep_busy: Callable[[], object]) -> None:
        self._bus_id, self._keep_busy = bus_id, keep_busy
        self._rounds = self._reasons = 0

    def note_round(self) -> None:
        """Asks nvidia-smi after each fifth round."""
        self._rounds += 1
        if self._rounds % _ROUNDS_A_LOOK == 0:
            self._reasons |= _read_throttling(self._bus_id, self._keep_busy)

    def explain(self) -> list[str]:
        """Says what was seen in any of the looks."""
        return explain_throttling(self._reasons)


def explain_throttling(reasons: int) -> list[str]:
    """Explains nvidia-smi's bits; says nothing of those that are not for heat or power."""
    causes = [cause for bit, cause in _THROTTLED.items() if reasons & bit]
    return [f"the GPU's clocks are lowered by {' and '.join(causes)}"] if causes else []


def find_drift(copy_ms: Sequence[float]) -> list[str]:
    """Says whether copies took another time in the second half of a run than in the first one."""
    half = len(copy_ms) // 2
    if half == 0:
        return []
    ratio = median(copy_ms[half:]) / median(copy_ms[:half])
    if max(ratio, 1 / ratio) <= 1 + _MOST_DRIFT:
        return []
    return [f"copies took {ratio:.2f} times as long in the second half as in the first one"]


def _read_throttling(bus_id: str, keep_busy: Callable[[], object]) -> int:
    """Returns the bits of NVML's reasons that hold now; 0 where nvidia-smi does not tell."""
    query = "--query-gpu=clocks_throttle_reasons.active"
    command = ["nvidia-smi", "-i", bus_id, query, "--format=csv,noheader"]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    try:
        with subprocess.Popen(command, stdout=pipe, stderr=nowhere, text=True) as asked:
            while asked.poll() is None:
                keep_busy()
            return int(asked.communicate()[0], 16)
    except (OSError, ValueError):
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
