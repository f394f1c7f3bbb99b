"""The cost of a checkpoint, compared with plain safetensors on the same bytes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

import gpuopt
from bench.harness import Offer
from gpuopt.bench.clock import Step
from gpuopt.bench.memory import measure_host_peak
from gpuopt.bench.workloads import Workload

# 1 GB, including the two slots of each variable.
_TENSORS = 4
_ELEMENTS = 10**9 // (3 * 4 * _TENSORS)
_BYTES = 3 * 4 * _TENSORS * _ELEMENTS

_MANY = 100_000


class _Saved:
    """Variables, and the same arrays for plain safetensors.

    Args:
        variables: What is saved.
        optimizers: Whose slots are saved, too.
    """

    def __init__(
        self, variables: Sequence[gpuopt.Variable], optimizers: Sequence[gpuopt.Optimizer] = ()
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ours = Path(self._folder.name, "gpuopt")
        self._plain = Path(self._folder.name, "plain.safetensors")
        self._saver = gpuopt.Saver(variables, max_to_keep=1, optimizers=optimizers)
        owned = [*variables, *(slot for each in optimizers for slot in each.variables())]
        self._tensors = {variable.name: variable.storage for variable in owned}
        self._saving: Future[str] | None = None

    def save(self) -> None:
        self._saver.save(self._ours)

    def save_async(self) -> None:
        self._saving = self._saver.save_async(self._ours)

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.result()

    def copy(self) -> None:
        for array in self._tensors.values():
            array.copy()

    def plain_save(self) -> None:
        save_file(self._tensors, self._plain)

    def plain_save_durably(self) -> None:
        self.plain_save()
        descriptor = os.open(self._plain, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def restore(self) -> None:
        self._saver.restore(self._ours)

    def plain_restore(self) -> None:
        load_file(self._plain)


def _make_large() -> _Saved:
    rng = np.random.default_rng(0)
    variables = [
        gpuopt.Variable(rng.standard_normal(_ELEMENTS, np.float32), name=f"w{i}")
        for i in range(_TENSORS)
    ]
    optimizer = gpuopt.AdamOptimizer(1e-3)
    optimizer.apply_gradients([(variable.storage, variable) for variable in variables])
    return _Saved(variables, [optimizer])


def _make_many() -> _Saved:
    arrays = [np.full(8, i, np.float32) for i in range(_MANY)]
    return _Saved([gpuopt.Variable(array, name=f"w{i}") for i, array in enumerate(arrays)])


def _make_many_saved() -> Workload:
    model = _make_many()
    return Workload(
        f"save {_MANY:,} variables of 8 elements",
        {"gpuopt": model.save, "safetensors": model.plain_save},
        4 * 8 * _MANY,
    )


def _make_many_restored() -> Workload:
    model = _make_many()
    model.save()
    model.plain_save()
    return Workload(
        f"restore {_MANY:,} variables of 8 elements from the page cache",
        {"gpuopt": model.restore, "safetensors": model.plain_restore},
        4 * 8 * _MANY,
    )


def _make_save() -> Workload:
    model = _make_large()
    contenders = {"gpuopt": model.save, "safetensors + fsync": model.plain_save_durably}
    return Workload(
        f"save {_BYTES / 1e9:.0f} GB of variables and slots durably",
        contenders,
        _BYTES,
        peak_extra_bytes=_measure_peaks(contenders),
    )


def _make_delay() -> Workload:
    """Begins an asynchronous save; the writing is not timed."""
    model = _make_large()
    return Workload(
        f"begin to save {_BYTES / 1e9:.0f} GB of variables and slots, and go on",
        {"gpuopt": model.save_async, "copies of the arrays": model.copy},
        2 * _BYTES,
        settle=model.wait,
    )


def _make_restore() -> Workload:
    model = _make_large()
    model.save()
    model.plain_save()
    contenders = {"gpuopt": model.restore, "safetensors": model.plain_restore}
    return Workload(
        f"restore {_BYTES / 1e9:.0f} GB of variables and slots from the page cache",
        contenders,
        _BYTES,
        peak_extra_bytes=_measure_peaks(contenders),
    )


def _measure_peaks(contenders: Mapping[str, Step]) -> dict[str, int]:
    """Measures what each step adds to the memory, where the system tells."""
    peaks = {name: measure_host_peak(step) for name, step in contenders.items()}
    return {name: peak for name, peak in peaks.items() if peak is not None}


OFFERS = (
    Offer("save_checkpoint", _make_save, is_slow=True),
    Offer("delay_by_checkpoint", _make_delay, is_slow=True),
    Offer("restore_checkpoint", _make_restore, is_slow=True),
    Offer("save_many_variables", _make_many_saved, is_slow=True),
    Offer("restore_many_variables", _make_many_restored, is_slow=True),
)
