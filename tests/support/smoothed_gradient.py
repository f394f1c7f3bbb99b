"""Smoothed gradients: a stage with a slot that gpuopt does not have, in one file.

Before it is clipped, each element of a gradient becomes the mean of all that it had so far, with
weights that grow by `1 / decay` from step to step. Rows that no gradient names stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpuopt.rules.stage import ORDER, Stage
from gpuopt.step.options import STAGE_OPTIONS
from gpuopt.step.stage_options import StageOption


def smooth(grad: Any, mean: Any, *, mean_decay: Any, mean_weight: Any) -> None:
    """Puts the mean of the gradients so far in the gradient's place."""
    mean += (1 - mean_decay) * (grad - mean)
    grad[...] = mean_weight * mean


class SmoothedGradient(StageOption):
    """The option `smoothed_gradient=decay`."""

    name = "smoothed_gradient"
    stage = Stage("smoothed", smooth, slots=("mean",))
    counter = "smoothed_steps"
    meaning = "Puts means of gradients, in which older ones decay by it, in their place."
    alone = 0.5

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @classmethod
    def checked(cls, given: Any, optimizer: Any) -> SmoothedGradient:
        return cls(given)

    def described(self) -> float:
        return self.decay

    def scalars(self, steps: int) -> Mapping[str, Any]:
        return {"mean_decay": self.decay, "mean_weight": 1 / (1 - self.decay ** (steps + 1))}


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it known: before clipping, and as an argument of optimizers."""
    order = ORDER["gradient"]
    first = order.index("bounded")
    placed = [*order[:first], SmoothedGradient.stage.name, *order[first:]]
    monkeypatch.setitem(ORDER, "gradient", placed)
    monkeypatch.setitem(STAGE_OPTIONS, SmoothedGradient.name, SmoothedGradient)
