"""Which optimizers the demo knows, with learning rates tuned for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpuopt.optimizers as optimizers
from gpuopt.optimizer import Optimizer
from gpuopt.variable import Variable

# Optimizer to arguments; AdagradDA also takes the global step. Each rate is within 0.3 points of
# the best of three or more tried, in mean accuracy over five folds of the training images.
TUNED: dict[str, dict[str, Any]] = {
    "GradientDescent": {"learning_rate": 0.5},
    "Momentum": {"learning_rate": 0.06, "momentum": 0.9},
    "Adagrad": {"learning_rate": 0.2},
    "AdagradDA": {"learning_rate": 0.45},
    "Adadelta": {"learning_rate": 20.0},
    "RMSProp": {"learning_rate": 0.004},
    # epsilon bounds the step where v, the square of a small gradient, is 0 in float16. With the
    # default of 1e-8, float16 stays near 85%; the other types do not feel the difference.
    "Adam": {"learning_rate": 0.005, "epsilon": 1e-4},
    "LazyAdam": {"learning_rate": 0.005, "epsilon": 1e-4},
    "Ftrl": {"learning_rate": 0.5},
    "ProximalGradientDescent": {"learning_rate": 0.5},
    "ProximalAdagrad": {"learning_rate": 0.2},
}


def make_optimizer(name: str, global_step: Variable) -> Optimizer:
    """Makes the optimizer `name` of `TUNED`."""
    make: Callable[..., Optimizer] = getattr(optimizers, f"{name}Optimizer")
    counted = {"global_step": global_step} if name == "AdagradDA" else {}
    return make(**TUNED[name], **counted)
