"""Runs that go on from a saved state, beside runs that were not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import gpuopt

Step = Callable[[Any, gpuopt.Variable, int], None]


class Run(NamedTuple):
    variable: gpuopt.Variable
    optimizer: Any


def check_a_restored_run(
    run: Run, other: Run, step: Step, folder: Path, *, by_saver: bool, is_made: bool
) -> None:
    """Compares the variables to the bit after three steps, a restore and one step more.

    Args:
        run: Makes all steps.
        other: Makes the last one, from the state that was saved before it.
        step: Makes a step of an optimizer and a variable, with gradients by a seed.
        folder: Of the checkpoint.
        by_saver: Whether the state is saved in a file, or by `state_dict`.
        is_made: Whether `other` has made a step before it is restored.
    """
    w, optimizer = run
    for seed in range(3):
        step(optimizer, w, seed)
    path = gpuopt.Saver({"w": w}, optimizers=[optimizer]).save(str(folder / "model"))
    kept, state = w.numpy(), optimizer.state_dict({"w": w})
    step(optimizer, w, 3)
    restored, optimizer = other
    if is_made:
        step(optimizer, restored, 9)
    if by_saver:
        gpuopt.Saver({"w": restored}, optimizers=[optimizer]).restore(path)
    else:
        optimizer.load_state_dict(state, {"w": restored})
        restored.assign(kept)
    step(optimizer, restored, 3)
    np.testing.assert_array_equal(restored.numpy(), w.numpy())
