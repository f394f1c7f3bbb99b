"""The programs in examples/ run, and learn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# For each program: how many steps it makes here, and what is left of its error then, at most.
LEARNS = {
    "neural_net": (40, 0.2),
    "neural_net_regression": (100, 0.1),
    "rnn": (15, 0.8),
    "lstm": (15, 0.9),
    "variational_autoencoder": (40, 0.8),
    "black_box_svi": (60, 0.3),
    "natural_gradient": (100, 0.3),
    "bayesian_neural_net": (30, 0.5),
    "mixture": (20, 0.8),
}


@pytest.mark.parametrize("name", LEARNS)
def test_an_example_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    steps, most = LEARNS[name]
    before, after = importlib.import_module(name).main(steps)
    assert after < most * before


def test_every_example_is_run() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}
    assert programs == set(LEARNS) | {"text"}, "text has what rnn and lstm learn"
