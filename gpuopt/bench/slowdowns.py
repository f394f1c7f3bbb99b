"""What else slows a machine down while it is timed."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
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


def find_gpu_throttling() -> list[str]:
    """Says whether a GPU's clocks are lowered at this moment, by heat or for power."""
    command = ["nvidia-smi", "--query-gpu=clocks_throttle_reasons.active", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return explain_throttling(answer.splitlines()[0]) if answer.strip() else []


def explain_throttling(reasons: str) -> list[str]:
    """Explains nvidia-smi's bits, as in "0x0000000000000004"; says nothing where it has none."""
    try:
        bits = int(reasons.strip(), 16)
    except ValueError:
        return []
    causes = [cause for bit, cause in _THROTTLED.items() if bits & bit]
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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
