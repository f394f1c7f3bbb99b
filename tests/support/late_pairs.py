"""A table whose rows catch up, and the same one that makes all steps, each with its optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpuopt
from gpuopt.step import tables_behind

HEIGHT = 40
SLICES = gpuopt.IndexedSlices


class Pair:
    """The same table twice: one catches up, and one makes all steps."""

    def __init__(self, make: Any = gpuopt.AdamOptimizer, *, height: int = HEIGHT, **options: Any):
        self.rng = np.random.default_rng(5)
        value = self.rng.normal(size=(height, 3)).astype(np.float32)
        self.late = gpuopt.Variable(value, name="late")
        self.exact = gpuopt.Variable(value, name="exact")
        self.optimizer = make(catch_up=True, name="Late", **options)
        self.all_rows = make(name="AllRows", **options)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            rows = self.rng.integers(0, max(self.late.shape[0] // 4, 1), 3)
            values = self.rng.normal(size=(3, 3)).astype(np.float32)
            self.apply(SLICES(values, rows))

    def apply(self, gradient: Any) -> None:
        self.optimizer.apply_gradients([(gradient, self.late)])
        self.all_rows.apply_gradients([(gradient, self.exact)])

    def is_behind(self) -> bool:
        return any(table.is_behind for _, table in tables_behind._behind())

    def slot(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.optimizer.get_slot(self.late, name).numpy(),
            self.all_rows.get_slot(self.exact, name).numpy(),
        )

    def check(self) -> None:
        close(self.late._array, self.exact._array)
        for name in self.all_rows.get_slot_names():
            close(*self.slot(name))


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-6, atol=2e-6)
