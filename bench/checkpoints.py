"""The cost of a checkpoint, compared with plain safetensors on the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gpuopt
from bench.harness import ROOT, Offer, Workload
from gpuopt.bench.memory import measure_host_peak

# 1 GB, including the two slots of each variable.
_TENSORS = 4
_ELEMENTS = 10**9 // (3 * 4 * _TENSORS)
_BYTES = 3 * 4 * _TENSORS * _ELEMENTS


class _Model:
    """Variables with Adam's slots, and the same arrays for plain safetensors."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.folder = tempfile.TemporaryDirectory()
        variables = [
            gpuopt.Variable(rng.standard_normal(_ELEMENTS, np.float32), name=f"w{i}")
            for i in range(_TENSORS)
        ]
        optimizer = gpuopt.AdamOptimizer(1e-3)
        optimizer.apply_gradients([(v.storage, v) for v in variables])
        self.saver = gpuopt.Saver(variables, max_to_keep=1, optimizers=[optimizer])
        owned = [*variables, *optimizer.variables()]
        self.tensors = {variable.name: variable.storage for variable in owned}
        self._saving: Future[str] | None = None

    def save(self) -> None:
        self.saver.save(Path(self.folder.name, "gpuopt"))

    def save_async(self) -> None:
        self._saving = self.saver.save_async(Path(self.folder.name, "gpuopt"))

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def copy(self) -> None:
        for array in self.tensors.values():
            array.copy()

    def plain_save(self) -> None:
        path = Path(self.folder.name, "plain.safetensors")
        save_file(self.tensors, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def restore(self) -> None:
        self.saver.restore(Path(self.folder.name, "gpuopt"))

    def plain_restore(self) -> None:
        load_file(Path(self.folder.name, "plain.safetensors"))


def save_checkpoint() -> Workload:
    """Makes the workload that saves 1 GB, until it is on the disk."""
    model = _Model()
    return Workload(
        name="save_checkpoint",
        description=f"save {_BYTES / 1e9:.0f} GB of variables and slots durably",
        bytes_moved=_BYTES,
        contenders={"gpuopt": model.save, "safetensors + fsync": model.plain_save},
        peak_extra_bytes=_measure_peaks({"gpuopt": "save", "safetensors + fsync": "plain_save"}),
    )


def delay_by_checkpoint() -> Workload:
    """Makes the workload that begins an asynchronous save; the writing is not timed."""
    model = _Model()
    return Workload(
        name="delay_by_checkpoint",
        description=f"begin to save {_BYTES / 1e9:.0f} GB of variables and slots, and go on",
        bytes_moved=2 * _BYTES,
        contenders={"gpuopt": model.save_async, "copies of the arrays": model.copy},
        settle=model.wait,
    )


def restore_checkpoint() -> Workload:
    """Makes the workload that restores 1 GB from the page cache."""
    model = _Model()
    model.save()
    model.plain_save()
    return Workload(
        name="restore_checkpoint",
        description=f"restore {_BYTES / 1e9:.0f} GB of variables and slots from the page cache",
        bytes_moved=_BYTES,
        contenders={"gpuopt": model.restore, "safetensors": model.plain_restore},
        peak_extra_bytes=_measure_peaks({"gpuopt": "restore", "safetensors": "plain_restore"}),
    )


OFFERS = (
    Offer("save_checkpoint", save_checkpoint),
    Offer("delay_by_checkpoint", delay_by_checkpoint),
    Offer("restore_checkpoint", restore_checkpoint),
)


def _measure_peaks(steps: dict[str, str]) -> dict[str, int]:
    """Measures the peak memory of each step, in a process of its own."""
    peaks = {}
    for contender, step in steps.items():
        command = [sys.executable, "-m", "bench.checkpoints", step]
        finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks[contender] = int(finished.stdout)
    return peaks


def _measure_peak(step: str) -> int | None:
    model = _Model()
    if "restore" in step:
        getattr(model, step.replace("restore", "save"))()
    run: Callable[[], None] = getattr(model, step)
    return measure_host_peak(run)


if __name__ == "__main__":
    print(_measure_peak(sys.argv[1]))
