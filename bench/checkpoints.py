"""The cost of a checkpoint, compared with plain safetensors on the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gpuopt
from bench.harness import Offer, Step, Workload
from gpuopt.bench.memory import measure_host_peak

# 1 GB, including the two slots of each variable.
_TENSORS = 4
_ELEMENTS = 10**9 // (3 * 4 * _TENSORS)
_BYTES = 3 * 4 * _TENSORS * _ELEMENTS

_MANY = 100_000


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


class _ManyVariables:
    """Variables of a few elements, and the same arrays for plain safetensors."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        arrays = [np.full(8, i, np.float32) for i in range(_MANY)]
        variables = [gpuopt.Variable(array, name=f"w{i}") for i, array in enumerate(arrays)]
        self.saver = gpuopt.Saver(variables, max_to_keep=1)
        self.tensors = {variable.name: variable.storage for variable in variables}

    def save(self) -> None:
        self.saver.save(Path(self.folder.name, "gpuopt"))

    def plain_save(self) -> None:
        save_file(self.tensors, Path(self.folder.name, "plain.safetensors"))

    def restore(self) -> None:
        self.saver.restore(Path(self.folder.name, "gpuopt"))

    def plain_restore(self) -> None:
        load_file(Path(self.folder.name, "plain.safetensors"))


def _make_many_saved() -> Workload:
    model = _ManyVariables()
    return Workload(
        "save_many_variables",
        f"save {_MANY:,} variables of 8 elements",
        4 * 8 * _MANY,
        {"gpuopt": model.save, "safetensors": model.plain_save},
    )


def _make_many_restored() -> Workload:
    model = _ManyVariables()
    model.save()
    model.plain_save()
    return Workload(
        "restore_many_variables",
        f"restore {_MANY:,} variables of 8 elements from the page cache",
        4 * 8 * _MANY,
        {"gpuopt": model.restore, "safetensors": model.plain_restore},
    )


def _make_save() -> Workload:
    model = _Model()
    contenders = {"gpuopt": model.save, "safetensors + fsync": model.plain_save}
    return Workload(
        "save_checkpoint",
        f"save {_BYTES / 1e9:.0f} GB of variables and slots durably",
        _BYTES,
        contenders,
        peak_extra_bytes=_measure_peaks(contenders),
    )


def _make_delay() -> Workload:
    """Begins an asynchronous save; the writing is not timed."""
    model = _Model()
    return Workload(
        "delay_by_checkpoint",
        f"begin to save {_BYTES / 1e9:.0f} GB of variables and slots, and go on",
        2 * _BYTES,
        {"gpuopt": model.save_async, "copies of the arrays": model.copy},
        settle=model.wait,
    )


def _make_restore() -> Workload:
    model = _Model()
    model.save()
    model.plain_save()
    contenders = {"gpuopt": model.restore, "safetensors": model.plain_restore}
    return Workload(
        "restore_checkpoint",
        f"restore {_BYTES / 1e9:.0f} GB of variables and slots from the page cache",
        _BYTES,
        contenders,
        peak_extra_bytes=_measure_peaks(contenders),
    )


def _measure_peaks(contenders: Mapping[str, Step]) -> dict[str, int]:
    """Measures what each step adds to the memory, where the system tells."""
    peaks = {name: measure_host_peak(step) for name, step in contenders.items()}
    return {name: peak for name, peak in peaks.items() if peak is not None}


OFFERS = (
    Offer("save_checkpoint", _make_save),
    Offer("delay_by_checkpoint", _make_delay),
    Offer("restore_checkpoint", _make_restore),
    Offer("save_many_variables", _make_many_saved),
    Offer("restore_many_variables", _make_many_restored),
)
