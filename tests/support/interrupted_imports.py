"""Interrupts the first import of each module that a first loss imports; run as a program."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpuopt


class Interrupting:
    """Raises KeyboardInterrupt when a module of some packages is first looked for."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("autograd", "gpuopt") and name not in self.found:
            self.found.append(name)
            raise KeyboardInterrupt


def run() -> None:
    finder = Interrupting()
    sys.meta_path.insert(0, finder)
    w = gpuopt.Variable(np.ones(3))
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    while True:
        before = len(finder.found)
        try:
            optimizer.minimize(lambda: np.sum(w * w))
            break
        except KeyboardInterrupt:
            assert len(finder.found) == before + 1
    np.testing.assert_array_equal(w.numpy(), np.full(3, -1))
    assert {"autograd", "autograd.numpy"} < set(finder.found)


if __name__ == "__main__":
    run()
