"""Losses, and the languages they are written in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fake_cupy
import numpy as np

import gpuopt
from gpuopt import Device, IndexedSlices, Variable

Gate = gpuopt.Optimizer
IDS = np.array([[1, 3], [3, 0]])
FEATURES = np.random.default_rng(0).normal(size=(2, 5))


def sgd(learning_rate: float = 0.1) -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(learning_rate)


def gradients_of(loss: Any, *var_list: Variable, **options: Any) -> list[Any]:
    pairs = sgd().compute_gradients(loss, list(var_list) or None, **options)
    assert not var_list or [variable for _, variable in pairs] == list(var_list)
    return [gradient for gradient, _ in pairs]


@dataclass
class Language:
    """How a loss is written for one engine; `xp` spells as numpy does.

    Attributes:
        put: Makes an array that the loss computes with.
        mark: Marks a loss for the engine.
        place: Moves a new variable to where the engine finds it.
        get: Brings a gradient back as a numpy array.
    """

    xp: Any
    put: Callable[[Any], Any]
    mark: Callable[[Any], Any] = lambda loss: loss
    place: Callable[[Variable], Variable] = lambda variable: variable
    get: Callable[[Any], np.ndarray] = np.asarray


def to_stand_in(variable: Variable) -> Variable:
    """Moves a variable to the emulated GPU, under its name."""
    variable._array = fake_cupy.asarray(variable._array)
    variable.device = Device("gpu")
    return variable


class Model:
    """An embedding and two layers; `unused` takes no part in the loss."""

    def __init__(self, language: Language) -> None:
        rng = np.random.default_rng(1)
        shapes = {"table": (6, 3), "w": (11, 4), "b": (4,), "u": (4, 2), "unused": (3,)}
        self.values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        self.variables = {
            name: language.place(Variable(value, name=name, dtype=np.float32))
            for name, value in self.values.items()
        }
        features, ids = language.put(FEATURES.astype(np.float32)), language.put(IDS)
        v, xp = self.variables, language.xp

        def loss() -> Any:
            rows = gpuopt.embedding_lookup(v["table"], ids).reshape((2, 6))
            hidden = xp.tanh(xp.concatenate([rows, features], 1) @ v["w"] + v["b"])
            return xp.mean((hidden @ v["u"] - 0.3) ** 2)

        self.loss = language.mark(loss)

    def expected(self, name: str) -> np.ndarray:
        """Central differences of the loss, written once more in plain numpy and float64."""

        def loss(values: dict[str, np.ndarray]) -> float:
            rows = values["table"][IDS].reshape(2, 6)
            hidden = np.tanh(np.concatenate([rows, FEATURES], 1) @ values["w"] + values["b"])
            return float(np.mean((hidden @ values["u"] - 0.3) ** 2))

        gradient, step = np.zeros_like(self.values[name]), 1e-6
        for index in np.ndindex(gradient.shape):
            ahead, behind = ({**self.values, name: self.values[name].copy()} for _ in range(2))
            ahead[name][index] += step
            behind[name][index] -= step
            gradient[index] = (loss(ahead) - loss(behind)) / (2 * step)
        return gradient


def dense(gradient: Any, get: Callable[[Any], np.ndarray] = np.asarray) -> np.ndarray:
    if not isinstance(gradient, IndexedSlices):
        return get(gradient)
    result = np.zeros(gradient.dense_shape, gradient.dtype)
    np.add.at(result, get(gradient.indices), get(gradient.values))
    return result
