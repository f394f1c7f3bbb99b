"""Optimizers whose tables may let rows catch up, and TensorFlow's cases of them."""

from __future__ import annotations

from functools import partial
from typing import Any

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
