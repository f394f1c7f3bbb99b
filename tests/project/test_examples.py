"""The programs in examples/ run, and learn."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# For each program: how many steps it makes here, and what is left of its first loss then, at most.
LEARNS = {
    "two_layer_net": (60, 0.5),
    "batch_norm": (20, 0.3),
    "word2vec": (60, 0.6),
    "phase_retrieval": (40, 0.3),
    "transformer": (20, 0.8),
}
# The stub driver has no cuFFT, and needs a minute to compile what the others call of CuPy.
NEED_A_REAL_GPU = {"phase_retrieval", "transformer", "two_layer_net"}


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = example(name, monkeypatch)
    monkeypatch.setattr(program, "xp", np)
    steps, most = LEARNS[name]
    before, after = program.main(steps)
    assert after < most * before


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.real_gpu] if name in NEED_A_REAL_GPU else [])
        for name in LEARNS
    ],
)
def test_an_example_learns_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = example(name, monkeypatch)
    assert program.xp.__name__ == "cupy"
    steps, most = LEARNS[name]
    before, after = program.main(steps)
    assert after < most * before


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LEARNS)
