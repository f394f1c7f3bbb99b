"""What saving and restoring takes is free again when it ends, without a garbage collection."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import gpuopt
from gpuopt import Saver, Variable

MEGABYTE = 2**20


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


def calls(path: Path) -> dict[str, Callable[[], object]]:
    w = Variable(np.zeros(MEGABYTE // 4, np.float32), name="w")
    gradient = np.ones(MEGABYTE // 4, np.float32)
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = Saver([w], optimizers=[optimizer], max_to_keep=1)
    optimizer.apply_gradients([(gradient, w)])
    saver.save(path)
    state = optimizer.state_dict({"w": w})
    return {
        "save": lambda: saver.save(path),
        "save_async": lambda: saver.save_async(path).result(),
        "restore": lambda: saver.restore(path),
        "state_dict": lambda: optimizer.state_dict({"w": w}),
        "load_state_dict": lambda: optimizer.load_state_dict(state, {"w": w}),
        "apply_gradients": lambda: optimizer.apply_gradients([(gradient, w)]),
        "minimize": lambda: optimizer.minimize(lambda: np.sum(w * w)),
    }


@pytest.mark.parametrize(
    "name",
    [
        "save",
        "save_async",
        "restore",
        "state_dict",
        "load_state_dict",
        "apply_gradients",
        "minimize",
    ],
)
def test_no_copy_of_the_state_is_left(name: str, tmp_path: Path, without_collections: None) -> None:
    call = calls(tmp_path / "model")[name]
    for _ in range(3):
        call()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(4):
        call()
    assert tracemalloc.get_traced_memory()[0] - before < MEGABYTE // 2
