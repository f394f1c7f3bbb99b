"""A table whose rows catch up, and the same one that makes all steps, each with its optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

import gpuopt
from gpuopt import IndexedSlices, Variable

HEIGHT = 40


class Pair:
    """The same table twice: one catches up, and one in host memory makes all steps."""

    def __init__(
        self,
        make: Any = gpuopt.AdamOptimizer,
        *,
        height: int = HEIGHT,
        dtype: Any = np.float32,
        device: str = "cpu",
        catch_up: Any = True,
        **options: Any,
    ):
        self.rng = np.random.default_rng(5)
        value = self.rng.normal(size=(height, 3)).astype(dtype)
        self.late = Variable(value, name="late", device=device)
        self.exact = Variable(value, name="exact")
        self.optimizer = make(catch_up=catch_up, name="Late", **options)
        self.all_rows = make(name="AllRows", **options)

    @property
    def both(self) -> tuple[tuple[Any, Variable], tuple[Any, Variable]]:
        """Each table with its optimizer."""
        return (self.optimizer, self.late), (self.all_rows, self.exact)

    def slices(self, number: int = 3) -> IndexedSlices:
        rows = self.rng.integers(0, max(self.late.shape[0] // 4, 1), number)
        values = self.rng.normal(size=(number, 3)).astype(self.late.dtype)
        return IndexedSlices(values, rows)

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.apply(self.slices())

    def apply(self, gradient: Any) -> None:
        for optimizer, table in self.both:
            optimizer.apply_gradients([(gradient, table)])

    def is_behind(self) -> bool:
        behind: Any = self.late.identity.behind
        return behind is not None and behind.is_behind

    def slot(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return (
            self.optimizer.get_slot(self.late, name).numpy(),
            self.all_rows.get_slot(self.exact, name).numpy(),
        )

    def check(self, tolerance: float = 2e-6) -> None:
        """Table and slots are those of all steps, and nothing is left to catch up with."""
        close(self.late, self.exact, tolerance)
        assert not self.is_behind()
        for name in self.all_rows.get_slot_names():
            close(*self.slot(name), tolerance)


def numbers(array: Any) -> np.ndarray:
    if isinstance(array, Variable):
        array = array.numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float64)


def close(one: Any, other: Any, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=tolerance, atol=tolerance)
