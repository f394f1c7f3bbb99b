"""Restores and assignments after a step that a GPU refuses: the late undo must not change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fake_cupy
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = [pytest.mark.contract, pytest.mark.emulator, pytest.mark.usefixtures("emulated_gpus")]


class Model(NamedTuple):
    table: Variable
    step: Variable
    optimizer: gpuopt.Optimizer

    def update(self, row: int) -> None:
        with fake_cupy.cuda.Device(0):
            values = fake_cupy.asarray(np.ones((1, 2), np.float32))
            slices = IndexedSlices(values, fake_cupy.asarray(np.array([row])))
        self.optimizer.apply_gradients([(slices, self.table)], self.step)

    def numbers(self) -> list[float]:
        state = self.optimizer.state_dict()
        powers = [float(state["non_slots"][name]) for name in sorted(state["non_slots"])]
        moment = state["slots"]["m"]["table"]
        return [*powers, float(self.step.numpy()), *moment.ravel(), *self.table.numpy().ravel()]


def make_model() -> Model:
    table = Variable(np.ones((4, 2), np.float32), name="table", device="gpu:0")
    step = Variable(np.int64(0), name="step")
    return Model(table, step, gpuopt.AdamOptimizer(0.1, on_nonfinite="skip"))


def load_state(model: Model, folder: Path) -> Callable[[], None]:
    state, values = model.optimizer.state_dict(), model.table.numpy()
    step = model.step.numpy()

    def load() -> None:
        model.optimizer.load_state_dict(state)
        model.step.assign(step)
        model.table.assign(values)

    return load


def restore(model: Model, folder: Path) -> Callable[[], None]:
    saver = gpuopt.Saver([model.table, model.step], optimizers=[model.optimizer])
    path = saver.save(folder / "model")
    return lambda: saver.restore(path)


@pytest.mark.parametrize("keep", [load_state, restore])
def test_a_restore_first_raises_what_a_gpu_has_found(
    keep: Callable[[Model, Path], Callable[[], None]], tmp_path: Path
) -> None:
    model = make_model()
    model.update(1)
    restore = keep(model, tmp_path)
    saved = model.numbers()
    model.update(2)
    model.update(9)
    with pytest.raises(IndexError, match='"table": row 9'):
        restore()
    assert model.numbers() != saved  # nothing was restored: the second step is there
    restore()
    model.optimizer.check()
    assert model.numbers() == saved


@pytest.mark.parametrize("mode", ["propagate", "raise", "skip"])
def test_an_assigned_global_step_is_not_counted_down(mode: str) -> None:
    model = make_model()._replace(optimizer=gpuopt.AdamOptimizer(0.1, on_nonfinite=mode))
    model.update(9)
    with pytest.raises(IndexError, match='"table": row 9'):
        model.step.assign(100)
    assert model.step.numpy() == 0
    model.step.assign(100)
    model.optimizer.check()
    assert model.step.numpy() == 100
