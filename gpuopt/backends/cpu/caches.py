"""The sizes of the CPU's caches."""

from __future__ import annotations

import re
from pathlib import Path


def read_cache_bytes() -> int:
    """Returns the size of the CPU's largest cache; where it is not known, that of a common one."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) * {"": 1, "K": 2**10, "M": 2**20}[found[2]])
    return max(sizes, default=32 * 2**20)
