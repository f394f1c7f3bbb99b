"""The arguments with which the demo runs each exported optimizer."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import gpuopt.optimizers as optimizers
from gpuopt.optimizer import Optimizer
from gpuopt.variables.variable import Variable

NAMES = [name.removesuffix("Optimizer") for name in vars(optimizers) if name.endswith("Optimizer")]
# What the demo trains with unless others are named.
DEFAULT_NAMES = ["GradientDescent", "Momentum", "Adagrad", "RMSProp", "Adam"]

# Written by tune.py, optimizer to learning rate.
RATES_FILE = files(__package__) / "data" / "learning_rates.toml"
TUNED: dict[str, float] = tomllib.loads(RATES_FILE.read_text())
# Most optimizers learn something at this rate.
UNTUNED_RATE = 0.01

# Arguments beside the learning rate.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Momentum": {"momentum": 0.9},
    # epsilon bounds the step where v, the square of a small gradient, is 0 in float16. With the
    # default of 1e-8, float16 stays near 85%; the other types do not feel the difference.
    "Adam": {"epsilon": 1e-4},
    "LazyAdam": {"epsilon": 1e-4},
    "AdamW": {"epsilon": 1e-4, "weight_decay": 1e-4},
    "MomentumW": {"momentum": 0.9, "weight_decay": 1e-4},
    "Nadam": {"epsilon": 1e-4},
    "AMSGrad": {"epsilon": 1e-4},
    "PartialRowWiseAdam": {"epsilon": 1e-4},
    "RAdam": {"epsilon": 1e-4},
    "RowWiseAdagrad": {"epsilon": 1e-4},
    "ScheduleFreeAdamW": {"epsilon": 1e-4},
    "TorchAdamW": {"epsilon": 1e-4},
    "TorchNAdam": {"epsilon": 1e-4},
    "AdaBelief": {"epsilon": 1e-4},
}


def make_optimizer(
    name: str, global_step: Variable, learning_rate: float | None = None
) -> Optimizer:
    """Makes an optimizer for the demo.

    Args:
        name: One of `NAMES`.
        global_step: For optimizers that read it.
        learning_rate: By default the tuned one, or `UNTUNED_RATE` where there is none.
    """
    make: Callable[..., Optimizer] = getattr(optimizers, f"{name}Optimizer")
    rate = TUNED.get(name, UNTUNED_RATE) if learning_rate is None else learning_rate
    arguments = {"learning_rate": rate, **ARGUMENTS.get(name, {})}
    if "global_step" in inspect.signature(make).parameters:
        arguments["global_step"] = global_step
    return make(**arguments)
