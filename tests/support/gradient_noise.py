"""Gradient noise (Neelakantan et al. 2015): a stage that gpuopt does not have, in one file.

Each element of a gradient gets a normal number of variance `eta / (1 + t)^gamma`, `t` the steps
made before: by a seed, the step, its variable and its number there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from gpuopt.rules.stage import ORDER, Stage
from gpuopt.step.options import STAGE_OPTIONS
from gpuopt.step.stage_options import StageOption


def add_noise(grad: Any, random: Any, *, noise_deviation: Any) -> None:
    """Adds a normal number to each element of the gradient (Box & Muller 1958)."""
    real = grad.dtype.type
    first, second = (
        (random >> np.uint64(place) & np.uint64(0xFFFFFF)).astype(grad.dtype) for place in (40, 16)
    )
    distance = np.sqrt(real(-2) * np.log((first + real(1)) * real(2.0**-24)))
    grad += noise_deviation * (distance * np.cos(second * real(2 * math.pi * 2.0**-24)))


class GradientNoise(StageOption):
    """The option `gradient_noise=(eta, gamma, seed)`."""

    name = "gradient_noise"
    stage = Stage("noisy", add_noise)
    counter = "noise_steps"
    meaning = "Gets each gradient a normal number, of variance `eta / (1 + t)^gamma`."
    alone = 0.1, 0.55, 0

    def __init__(self, eta: float, gamma: float, seed: int) -> None:
        self.eta, self.gamma, self.seed = eta, gamma, seed

    @classmethod
    def checked(cls, given: Any, optimizer: Any) -> GradientNoise:
        return cls(*given)

    def described(self) -> dict[str, Any]:
        return {"eta": self.eta, "gamma": self.gamma, "seed": self.seed}

    def scalars(self, steps: int) -> Mapping[str, Any]:
        deviation = math.sqrt(self.eta / (1 + steps) ** self.gamma)
        return {"noise_deviation": deviation, **self.stage.key(self.seed, steps)}


class UnscaledNoise(GradientNoise):
    """The option `unscaled_noise`: the same, before gradients are clipped."""

    name = "unscaled_noise"
    stage = Stage("noisy_unscaled", add_noise)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes them known: after clipping and before it, and as arguments of optimizers."""
    unscaled, *clips = ORDER["gradient"]
    order = [unscaled, UnscaledNoise.stage.name, *clips, GradientNoise.stage.name]
    monkeypatch.setitem(ORDER, "gradient", order)
    for each in (GradientNoise, UnscaledNoise):
        monkeypatch.setitem(STAGE_OPTIONS, each.name, each)
