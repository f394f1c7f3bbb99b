"""Which random programs a run of the tests makes, by its environment.

GPUOPT_FUZZ_SEED: that program alone; GPUOPT_FUZZ_ONLY: of its operations those with these numbers.
GPUOPT_FUZZ_SECONDS: programs by new seeds for so long; GPUOPT_FULL=1 is as 120.
"""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Callable, Iterable

import driver
import pytest

HOST = ("cpu",)
GPUS = ("cpu", "gpu:0", "gpu:1")
# A long run is made of tests of so many seconds: several processes share them.
PART_S = 30.0
# In which order streams go on.
POLICIES = ("newest", "random", "oldest", "random", "immediate")
OPERATIONS = 40

_seed = os.environ.get("GPUOPT_FUZZ_SEED")
_only = os.environ.get("GPUOPT_FUZZ_ONLY")
_is_full = bool(os.environ.get("GPUOPT_FULL"))
_default = "120" if _is_full else "0"
_seconds = float(os.environ.get("GPUOPT_FUZZ_SECONDS", _default)) if _seed is None else 0
PARTS = range(-int(-_seconds // PART_S))
NUMBERS = range(OPERATIONS) if _only is None else [int(number) for number in _only.split(",")]


def seeds(count: int) -> list[int]:
    """Returns the seeds of a short run, always the same: a quarter unless GPUOPT_FULL=1."""
    return list(range(count if _is_full else count // 4)) if _seed is None else [int(_seed)]


def run_for_a_while(run: Callable[[int, Iterable[int]], None]) -> None:
    """Runs programs of all lengths for one part of a long run.

    Args:
        run: Runs the program of a seed: its operations of these numbers.
    """
    first = secrets.randbits(40)
    print(f"seeds from {first}")
    end = time.monotonic() + PART_S
    seed = first
    while time.monotonic() < end:
        run(seed, range(10 + seed * 37 % 190))
        seed += 1


def on_late_streams(
    run: Callable[[int, Iterable[int]], None],
) -> Callable[[int, Iterable[int]], None]:
    """Returns a function that runs programs in an order of the stub driver's streams."""

    def run_late(seed: int, numbers: Iterable[int]) -> None:
        gc.collect()  # names of the last program's variables
        with driver.schedule(POLICIES[seed % len(POLICIES)], seed):
            run(seed, numbers)
            assert driver.take_reports() == [], f"the program of seed {seed}"

    return run_late


def how_to_repeat(file: str, seed: int, numbers: Iterable[int], log: Iterable[str]) -> str:
    """Returns the note of a program that has failed."""
    only = ",".join(map(str, numbers))
    command = f'GPUOPT_FUZZ_SEED={seed} GPUOPT_FUZZ_ONLY={only} make test ARGS="tests/fuzz/{file}"'
    return "\n".join(
        ["The program so far:", *log, "To repeat it, or fewer of its operations:", command]
    )


_nobody_asks = pytest.mark.skip(reason="GPUOPT_FULL or GPUOPT_FUZZ_SECONDS asks for a long run")
long_run = pytest.mark.parametrize("part", PARTS or [pytest.param(0, marks=_nobody_asks)])
