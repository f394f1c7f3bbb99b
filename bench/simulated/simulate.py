"""Simulates a task: records its launches, replays them in GPGPU-Sim, and compares the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from bench.gpu_launches import run_on_driver
from bench.harness import ROOT
from bench.simulated.expected import expect, largest_error
from bench.simulated.simulator import MULTIPROCESSORS, Simulator, write_config
from bench.simulated.statistics import Simulated, read_launches
from bench.simulated.tasks import Arrays, Copy, Dense, Sparse, Task

_FOLDER = Path(__file__).parent
# The simulator's memory begins here, and its loads take addresses of 32 bits.
FIRST_ADDRESS = 0xC0000000
_COPY_THREADS, _PACK_BYTES = 256, 16


class Outcome(NamedTuple):
    """What came of a task.

    Attributes:
        launches: In order.
        largest_error: Of all results, as a share of what is allowed; see `expected`.
    """

    launches: list[Simulated]
    largest_error: float


def simulate(task: Task, simulator: Simulator) -> Outcome:
    """Simulates a task.

    Raises:
        ValueError: the simulator has not run every launch to its end; its output is in the message.
    """
    with TemporaryDirectory(prefix="gpuopt-simulated-") as name:
        folder = Path(name)
        given: Arrays = {}
        if isinstance(task, Copy):
            _write_copy(task, folder)
        else:
            given = task.draw()
            record_step(task, given, folder)
        launches = read_launches(_replay(simulator, folder))
        recorded = json.loads((folder / "launches.json").read_text())
        if len(launches) != len(recorded["launches"]):
            raise ValueError(
                f"the simulator ran {len(launches)} of {len(recorded['launches'])} launches"
            )
        after = np.fromfile(folder / "after.bin", np.uint8)
    if isinstance(task, Copy):
        half = task.num_bytes // 2
        return Outcome(launches, 0.0 if np.array_equal(after[:half], after[half:]) else np.inf)
    errors = []
    for key, expected in expect(task.optimizer, given, recorded["step"]).items():
        before = given[key]
        begin = recorded["arrays"][key] - recorded["begin"]
        got = after[begin : begin + before.nbytes].view(before.dtype).reshape(before.shape)
        errors.append(largest_error(got, expected, before))
    return Outcome(launches, max(errors))


def record_step(task: Dense | Sparse, given: Arrays, folder: Path) -> None:
    """Has `recording` write the launches and memory of a task's step, with these arrays."""
    optimizer = task.optimizer
    description = {
        "optimizer": optimizer.name,
        "arguments": dict(optimizer.arguments),
        "alignment": task.alignment,
    }
    arrays: dict[str, Any] = {"description": json.dumps(description), **given}
    np.savez(folder / "job.npz", **arrays)
    run_on_driver(
        [str(_FOLDER / "recording.py"), str(folder)],
        MULTIPROCESSORS,
        environment={
            "GPUOPT_DRIVER_DEVICES": "1",
            "GPUOPT_DRIVER_FIRST_ADDRESS": hex(FIRST_ADDRESS),
        },
    )


def _write_copy(task: Copy, folder: Path) -> None:
    """Writes what `recording` writes of a step."""
    half = task.num_bytes // 2
    memory = np.zeros(2 * half, np.uint8)
    memory[:half] = np.random.default_rng(0).integers(0, 256, half, np.uint8)
    memory.tofile(folder / "memory.bin")
    packs = half // _PACK_BYTES
    arguments = (FIRST_ADDRESS, FIRST_ADDRESS + half, packs)
    launch = {
        "kernel": "copy_packs",
        "grid": -(-packs // _COPY_THREADS),
        "block": _COPY_THREADS,
        "arguments": [value.to_bytes(8, "little").hex() for value in arguments],
    }
    source = (_FOLDER / "copy.cu").read_text()
    recorded = {
        "begin": FIRST_ADDRESS,
        "launches": [launch],
        "sources": [{"source": source, "options": ["-std=c++17"], "kernels": ["copy_packs"]}],
    }
    (folder / "launches.json").write_text(json.dumps(recorded))


def _replay(simulator: Simulator, folder: Path) -> str:
    """Returns what the simulator prints."""
    write_config(simulator, folder)
    where = (folder, simulator.library, simulator.nvrtc, simulator.headers)
    with (folder / "log").open("w") as log:
        finished = subprocess.run(
            [sys.executable, "-m", "bench.simulated.replay", *map(str, where)],
            cwd=folder,
            env={**os.environ, **simulator.environment, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    printed = (folder / "log").read_text(errors="replace")
    if finished.returncode or not (folder / "after.bin").exists():
        raise ValueError(f"the simulator fails:\n{printed[-4000:]}")
    return printed
