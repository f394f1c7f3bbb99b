"""Saved states with and without loss scaling, and with several managers, restored elsewhere."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable

pytestmark = pytest.mark.contract

MANAGERS: Any = {
    "none": None,
    "fixed": lambda scale: gpuopt.FixedLossScaleManager(scale),
    "dynamic": lambda scale: gpuopt.DynamicLossScale(scale, 3),
    "exponential": lambda scale: gpuopt.ExponentialUpdateLossScaleManager(scale, 3),
    "own": lambda scale: OwnManager(),
}


class OwnManager(gpuopt.LossScaleManager):
    def get_loss_scale(self) -> float:
        return 2.0

    def update_loss_scale(self, finite_grads: Any) -> None:
        pass


def around_adam(kind: str, scale: float, name: str = "Adam") -> Any:
    manager = MANAGERS[kind]
    adam = gpuopt.AdamOptimizer(0.1, name=name)
    return adam if manager is None else gpuopt.LossScaleOptimizer(adam, manager(scale))


# By a state and by a file in turn.
@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (before, after, ("state", "saver")[number % 2])
        for number, (before, after) in enumerate(itertools.product(MANAGERS, repeat=2))
    ],
)
def test_a_run_goes_on_with_another_manager_with_one_and_without(
    before: str, after: str, how: str, tmp_path: Path
) -> None:
    def step(optimizer: Any, variable: Variable, gradient: float) -> None:
        optimizer.apply_gradients([(np.float32([gradient]), variable)])

    w = Variable([1.0], name="w")
    first = around_adam(before, 64)
    for gradient in (1, np.inf, 2) if before != "none" else (1, 2):
        step(first, w, gradient)
    state, value = first.state_dict(), w.numpy()
    expected = [first.state_dict()["non_slots"]["beta1_power"], first.get_slot(w, "m").numpy()]
    had = {name: float(getattr(first, name, 0)) for name in ("loss_scale", "num_skipped")}
    good = state["non_slots"].get("good_steps", 0)
    if how == "saver":
        gpuopt.Saver(optimizers=[first]).save(tmp_path / "before")
    del first
    gc.collect()
    second = around_adam(after, 16)
    step(second, w, 5)
    if how == "saver":
        gpuopt.Saver(optimizers=[second]).restore(tmp_path / "before")
    else:
        second.load_state_dict(state)
        w.assign(value)
    changes, changed = (each in ("dynamic", "exponential") for each in (after, before))
    if after != "none":
        assert second.num_skipped == had["num_skipped"]
    if after in ("fixed", "dynamic", "exponential"):
        is_taken_over = changes and before not in ("none", "own")
        assert second.loss_scale == (had["loss_scale"] if is_taken_over else 16)
    now = second.state_dict()
    assert set(now["non_slots"]) >= {"beta1_power", "beta2_power"}
    if changes:
        assert now["non_slots"]["good_steps"] == (good if changed else 0)
    assert w.numpy() == value
    np.testing.assert_equal(
        [now["non_slots"]["beta1_power"], second.get_slot(w, "m").numpy()], expected
    )


def test_a_restore_still_names_what_is_here_and_not_in_the_file(tmp_path: Path) -> None:
    w = Variable([1.0], name="w")
    saver = gpuopt.Saver(optimizers=[around_adam("none", 1)])
    good_steps = Variable(3, name="good_steps")
    saver.save(tmp_path / "file")
    del good_steps
    gc.collect()
    with pytest.raises(gpuopt.CheckpointError, match='holds "good_steps", which nothing here'):
        saver.restore(tmp_path / "file")
    mine = Variable(3, name="num_skipped")
    with pytest.raises(gpuopt.CheckpointError, match='holds no "num_skipped"'):
        saver.restore(tmp_path / "file")
    assert (w.numpy(), mine.numpy()) == (1, 3)
