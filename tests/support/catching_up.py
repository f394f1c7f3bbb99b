"""Optimizers whose tables may let rows catch up, and TensorFlow's cases of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from golden_cases import EXTENDED, GoldenCase, optimizer_cases

import gpuopt

OPTIMIZERS: dict[str, Any] = {
    "Adam": gpuopt.AdamOptimizer,
    "AdamW": partial(gpuopt.AdamWOptimizer, 0.01),
    "Nadam": gpuopt.NadamOptimizer,
    "AddSign": gpuopt.AddSignOptimizer,
    "PowerSign": gpuopt.PowerSignOptimizer,
}
CASES = [
    case
    for case in optimizer_cases()
    if case["optimizer"] in OPTIMIZERS and case["mode"] != "dense" and case["dtype"] != "float16"
]
TOLERANCE = {"float64": 1e-7, "float32": 3e-6}


class CatchingUp(GoldenCase):
    """A case of TensorFlow's, by an optimizer that lets rows catch up."""

    def __init__(self, case: dict[str, Any], catch_up: Any) -> None:
        super().__init__(case)
        self._catch_up = catch_up

    @property
    def optimizer_class(self) -> Any:
        made = EXTENDED.get(self.optimizer_name) or getattr(gpuopt, self.optimizer_name)
        return partial(made, catch_up=self._catch_up)


def roundings_of_a_named_row(name: str, device: str = "cpu", dtype: Any = np.float32) -> float:
    """Returns how far a row is from its step in float64 after steps that it has missed.

    In distances between numbers of the variable's type: no more than 0.5 if it is rounded once. Its
    weights are so large that no other rounding counts, but not so large that it does not move.
    """
    rng = np.random.default_rng(7)
    least = 8 if np.dtype(dtype).itemsize == 2 else 1_024
    value = rng.uniform(least, 2 * least, (2, 4_096)).astype(dtype)
    late = gpuopt.Variable(value, device=device)
    exact = gpuopt.Variable(value.astype(np.float64))
    optimizers = [
        OPTIMIZERS[name](learning_rate=0.01, catch_up=True),
        OPTIMIZERS[name](learning_rate=0.01),
    ]
    for step in range(7):
        row = [0 if step in (0, 6) else 1]
        gradient = rng.uniform(1, 2, (1, value.shape[1])) * rng.choice([-1, 1], value.shape[1:])
        for optimizer, table in zip(optimizers, (late, exact), strict=True):
            slices = gpuopt.IndexedSlices(gradient.astype(dtype).astype(table.dtype), row)
            optimizer.apply_gradients([(slices, table)])
        if step == 0:  # from here on
            exact.assign(late.numpy().astype(np.float64))
    got, expected = late.numpy()[0], exact.numpy()[0]
    distance = abs(got.astype(np.float64) - expected)
    return float((distance / np.spacing(np.abs(got)).astype(np.float64)).max())
