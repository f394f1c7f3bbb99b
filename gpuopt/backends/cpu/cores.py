"""The cores that this process may use, and the CPU's caches."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path


def cores() -> frozenset[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cores(root: Path = Path("/")) -> int:
    """Returns how many cores can run this process at once: a container may have part of them.

    Args:
        root: Where the system's files are.
    """
    return min([len(cores()), *map(math.ceil, _quotas(root))])


def read_cache_bytes() -> int:
    """Returns the size of the CPU's largest cache; where it is not known, that of a common one."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]])
    return max(sizes, default=32 * 2**20)


def _quotas(root: Path) -> list[float]:
    """Returns how many cores' time each control group of this process may use (Linux)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    quotas = []
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            quotas += _in_all_groups(mounts, path, _quota_2)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                quotas += _in_all_groups(mounts / name, path, _quota_1)
    return [quota for quota in quotas if quota > 0]


def _in_all_groups(mount: Path, path: str, read: Callable[[Path], float]) -> list[float]:
    """Reads the quotas of a group and of those around it; a container sees the last ones alone."""
    group = mount / path.lstrip("/")
    found = []
    for folder in (group, *group.parents):
        if folder.is_relative_to(mount):
            try:
                found.append(read(folder))
            except (OSError, ValueError):  # no quota, or "max"
                continue
    return found


def _quota_2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_1(folder: Path) -> float:
    # -1 for none.
    quota, period = (
        int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
    )
    return quota / period
