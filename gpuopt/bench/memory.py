"""How much memory a step takes beside what it keeps."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

from gpuopt.bench.clock import Clock, Step

_OF_THIS_PROCESS = Path("/proc/self")
# proc(5): writing this to clear_refs sets the process's peak to what it has now.
_RESET_PEAK = "5"


def measure_host_peak(step: Step) -> int | None:
    """Returns by how much a step's peak is above the memory before it, in whole pages.

    What a library keeps for its next steps is not seen. None where the system does not tell.
    """
    try:
        # Freed memory that the C library keeps would hide what the step allocates.
        ctypes.CDLL(None).malloc_trim(0)
        (_OF_THIS_PROCESS / "clear_refs").write_text(_RESET_PEAK)
        before = read_status_bytes("VmRSS")
        step()
        return max(0, read_status_bytes("VmHWM") - before)
    except (OSError, AttributeError):
        return None


def read_status_bytes(field: str) -> int:
    """Reads a line of this process's status, as proc(5) describes it."""
    status = (_OF_THIS_PROCESS / "status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def measure_gpu_peak(step: Step, clock: Clock, cupy: Any) -> int:
    """Returns how much memory a step takes from the pools of CuPy and torch, at most."""
    clock.synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = int(pool.used_bytes())
    cuda = sys.modules["torch"].cuda if "torch" in sys.modules else None
    if cuda is not None and cuda.is_initialized():
        cuda.reset_peak_memory_stats()
        before += int(cuda.memory_allocated())
    step()
    clock.synchronize()
    after = int(pool.total_bytes())
    if cuda is not None and cuda.is_initialized():
        after += int(cuda.max_memory_allocated())
    return max(0, after - before)
