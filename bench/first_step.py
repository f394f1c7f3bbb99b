"""The first step of a new process, whose program is compiled, or was by an earlier process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpuopt
from bench.harness import Offer
from bench.targets import Target
from gpuopt.bench.workloads import Workload

_COMPILED = "compiled by an earlier process"
_WORKER = Path(__file__).with_name("first_step_worker.py")
# What is stepped, in words.
KINDS = {"dense": "Adam", "rows": "LazyAdam", "slot_bits": "Adam with slots in 8 bits"}
_MOST_MS = 500.0


def run(kind: str, device: str, folder: str) -> dict[str, Any]:
    """Runs a process that makes two steps with this process's gpuopt; returns what it prints.

    Args:
        kind: Among `KINDS`.
        device: Where the variable is.
        folder: Of compiled programs.

    Raises:
        CalledProcessError: it has failed.
    """
    path = [str(Path(gpuopt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "GPUOPT_CACHE_DIR": folder,
        "CUPY_CACHE_DIR": folder,
    }
    command = [sys.executable, str(_WORKER), kind, device, folder]
    finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def _offer() -> Iterator[Offer]:
    for kind in KINDS:
        name = f"first_step_{kind}"
        target = Target(name, "extra_ms", _COMPILED, at_most=_MOST_MS)
        yield Offer(name, partial(_make, kind), [target], is_slow=True)


def _make(kind: str) -> Workload:
    kept = TemporaryDirectory()

    def step() -> None:
        with TemporaryDirectory() as empty:
            run(kind, "cpu", empty)

    def step_again() -> None:
        run(kind, "cpu", kept.name)

    contenders = {"gpuopt": step, _COMPILED: step_again}
    return Workload(f"A process with two steps of {KINDS[kind]}", contenders)


OFFERS = (*_offer(),)
