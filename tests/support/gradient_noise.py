"""Gradient noise (Neelakantan et al. 2015): a stage that gpuopt does not have, in one file.

Each element of a gradient gets a normal number of variance `eta / (1 + t)^gamma`, `t` the steps
made before: by a seed, the step, its variable's name and its number there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.optimizers.base.stage_options import STAGE_OPTIONS
from gpuopt.rules.random_bits import GOLDEN, mixed
from gpuopt.rules.rounded import key_of_step
from gpuopt.rules.stage import ORDER, Stage
from gpuopt.rules.staged import staged
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.step.stage_options import StageOfStep, StageOption
from gpuopt.variables.variable import Variable


def add_noise(
    grad: Any,
    number: Any,
    *,
    noise_deviation: Any,
    noise_key_0: Any,
    noise_key_1: Any,
    noise_key_2: Any,
    noise_key_3: Any,
) -> None:
    """Adds a normal number to each element of the gradient (Box & Muller 1958)."""
    key, real = np.uint64(0), grad.dtype.type
    for place, part in enumerate((noise_key_0, noise_key_1, noise_key_2, noise_key_3)):
        key = key | part.astype(np.uint64) << np.uint64(16 * place)
    bits = mixed(key + (number + np.uint64(1)) * GOLDEN)
    first, second = (
        (bits >> np.uint64(place) & np.uint64(0xFFFFFF)).astype(grad.dtype) for place in (40, 16)
    )
    distance = np.sqrt(real(-2) * np.log((first + real(1)) * real(2.0**-24)))
    grad += noise_deviation * (distance * np.cos(second * real(2 * math.pi * 2.0**-24)))


_NOISE = Stage("noisy", add_noise)


def number_of(name: str) -> int:
    """Returns the first number of a variable, by what its name has before "_"."""
    digest = hashlib.sha256(name.partition("_")[0].encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


class GradientNoise(StageOption):
    """The option `gradient_noise=(eta, gamma, seed)`."""

    name = "gradient_noise"
    counter = "noise_steps"

    def __init__(self, eta: float, gamma: float, seed: int) -> None:
        self.eta, self.gamma, self.seed = eta, gamma, seed

    @classmethod
    def checked(cls, given: Any, optimizer: Any) -> GradientNoise:
        return cls(*given)

    def described(self) -> dict[str, Any]:
        return {"eta": self.eta, "gamma": self.gamma, "seed": self.seed}

    def first_number(self, variable: Variable) -> int:
        return number_of(variable.name)

    def of_step(self, steps: int) -> NoiseOfStep:
        return NoiseOfStep(self, steps)


class NoiseOfStep(StageOfStep):
    """The noise of one step."""

    def __init__(self, noise: GradientNoise, steps: int) -> None:
        self._deviation = math.sqrt(noise.eta / (1 + steps) ** noise.gamma)
        parts = key_of_step(noise.seed, steps).values()
        self._key = {f"noise_key_{place}": part for place, part in enumerate(parts)}

    def join(
        self, rule: UpdateRule, dtype: np.dtype[Any], scalars: Sequence[Scalars]
    ) -> tuple[UpdateRule, Sequence[Scalars]]:
        own = {"noise_deviation": compute_type(dtype)(self._deviation), **self._key}
        return staged(rule, _NOISE), [{**each, **own} for each in scalars]


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes it known: after clipping, and as an argument of optimizers."""
    monkeypatch.setitem(ORDER, "gradient", [*ORDER["gradient"], _NOISE.name])
    monkeypatch.setitem(STAGE_OPTIONS, GradientNoise.name, GradientNoise)
