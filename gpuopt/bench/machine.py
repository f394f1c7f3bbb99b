"""What a benchmark runs on: how fast it copies, what there is of memory, what slows it down."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from gpuopt.backends.cpu.compiler import compiler
from gpuopt.backends.cpu.threads import num_threads, share_out


def make_host_copy(num_bytes: int) -> Callable[[], object]:
    """Makes a copy in host memory, by as many threads as gpuopt uses for a large update."""
    source = np.ones(num_bytes // 8)
    target = np.zeros_like(source)
    threads = num_threads()
    parts = list(zip(np.array_split(target, 16), np.array_split(source, 16), strict=True))
    return lambda: share_out(lambda part: np.copyto(*part), parts, threads)


def count_free_bytes() -> int | None:
    """Returns how much memory programs can have without swapping; None if unknown."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s*(\d+) kB", text)
    return 1024 * int(found[1]) if found else None


def describe_commit(checkout: Path) -> str:
    """Returns a checkout's commit, with "-dirty" behind it if files have changed since.

    "unknown" where there is no git, or no checkout, as in a container.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        finished = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return finished.stdout.strip() or "unknown"


def describe_machine() -> dict[str, Any]:
    """Describes the machine and the libraries."""
    return {
        "cpu": read_cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **{name: _find_version(name) for name in ("torch", "optax", "jax", "thinc")},
        "compiler": " ".join(compiler() or []) or None,
        "threads": num_threads(),
    }


def read_cpu_model() -> str:
    """Returns the CPU's name, or where it is not known, its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    found = re.search(r"model name\s*: (.+)", text)
    return found[1] if found else platform.machine()


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
