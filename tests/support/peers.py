"""Runs optimizers of other libraries beside ours, in float64, and says how far apart they end.

The libraries are imported when they are needed: the table in docs/optimizers.md is written without.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import gpuopt

LIBRARIES = ["torch", "optax", "schedulefree", "lion_pytorch"]
STEPS = 20
# Sums in another order.
ROUNDING = 1e-12
Weights = list[np.ndarray]


class Case(NamedTuple):
    """An optimizer of ours, one of a peer's, and what was measured.

    Attributes:
        ours: The name of our optimizer, less "Optimizer".
        arguments: For ours, beside the learning rate.
        peer: The peer's, with its module.
        settings: For the peer's, beside the learning rate.
        distance: How far apart they end after `STEPS` steps, relative to how far the peer's moved:
            0 up to `ROUNDING`.
    """

    ours: str
    arguments: dict[str, Any]
    peer: str
    settings: dict[str, Any]
    distance: float = 0.0

    @property
    def identifier(self) -> str:
        return f"{call(self.ours, self.arguments)} - {call(self.peer, self.settings)}"


CASES = [
    Case("TorchAdamW", {}, "torch.optim.AdamW", {}),
    Case("TorchAdamW", {"epsilon": 0.1}, "torch.optim.AdamW", {"eps": 0.1}),
    Case("TorchAdamW", {}, "optax.adamw", {"weight_decay": 0.01}),
    Case("TorchAdamW", {"weight_decay": 0.0}, "torch.optim.Adam", {}),
    Case("AdamW", {"weight_decay": 0.01}, "torch.optim.AdamW", {"weight_decay": 0.01}, 2.4),
    Case("AMSGrad", {}, "torch.optim.Adam", {"amsgrad": True}),
    Case("AMSGrad", {"epsilon": 0.1}, "torch.optim.Adam", {"amsgrad": True, "eps": 0.1}),
    Case("AMSGrad", {"form": "optax"}, "optax.amsgrad", {}),
    Case("AMSGrad", {"form": "optax", "epsilon": 0.1}, "optax.amsgrad", {"eps": 0.1}),
    Case("AMSGrad", {}, "optax.amsgrad", {}, 0.21),
    # torch keeps its product in float32.
    Case("TorchNAdam", {}, "torch.optim.NAdam", {}, 3.7e-9),
    Case("TorchNAdam", {"epsilon": 0.1}, "torch.optim.NAdam", {"eps": 0.1}, 3.5e-9),
    Case("TorchNAdam", {}, "optax.nadam", {}, 0.48),
    Case("Nadam", {}, "torch.optim.NAdam", {}, 0.9),
    Case("Nadam", {}, "optax.nadam", {}, 0.16),
    Case("RAdam", {}, "torch.optim.RAdam", {}),
    Case("RAdam", {"epsilon": 0.1}, "torch.optim.RAdam", {"eps": 0.1}),
    Case("RAdam", {}, "optax.radam", {}, 5.6e-9),
    Case("RAdam", {"epsilon": 0.1}, "optax.radam", {"eps": 0.1}, 0.026),
    Case("Lion", {"weight_decay": 0.1}, "lion_pytorch.Lion", {"weight_decay": 0.1}),
    Case("Lion", {"weight_decay": 0.1}, "optax.lion", {"weight_decay": 0.1}),
    Case("AdaBelief", {}, "optax.adabelief", {}),
    Case(
        "AdaBelief",
        {"epsilon": 0.1, "epsilon_root": 0.01},
        "optax.adabelief",
        {"eps": 0.1, "eps_root": 0.01},
    ),
    Case("TorchSGD", {"weight_decay": 0.1}, "torch.optim.SGD", {"weight_decay": 0.1}),
    Case("TorchSGD", {"dampening": 0.3}, "torch.optim.SGD", {"dampening": 0.3}),
    Case(
        "TorchSGD",
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        "torch.optim.SGD",
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ),
    Case(
        "TorchSGD",
        {"momentum": 0.9, "weight_decay": 0.1, "use_nesterov": True},
        "torch.optim.SGD",
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ),
    Case(
        "ScheduleFreeSGD",
        {"weight_decay": 0.1},
        "schedulefree.SGDScheduleFree",
        {"weight_decay": 0.1},
    ),
    Case(
        "ScheduleFreeAdamW",
        {"weight_decay": 0.1},
        "schedulefree.AdamWScheduleFree",
        {"weight_decay": 0.1},
    ),
]


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def what_is_missing() -> str | None:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    return f"{', '.join(missing)}: not installed; see make test-peers" if missing else None


def start() -> Weights:
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape) for shape in ((4, 3), (5,), ())]


def gradients() -> list[Weights]:
    rng = np.random.default_rng(8)
    steps = [[rng.normal(size=w.shape) for w in start()] for _ in range(STEPS)]
    steps[5] = [0 * g for g in steps[5]]
    return steps


def distance(case: Case, learning_rate: float = 0.01) -> float:
    ours, peers = our_weights(case, learning_rate), peers_weights(case, learning_rate)
    return norm_of_difference(ours, peers) / norm_of_difference(peers, start())


def norm_of_difference(first: Weights, second: Weights) -> float:
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(first, second, strict=True))))


def our_weights(case: Case, learning_rate: float) -> Weights:
    optimizer = getattr(gpuopt, f"{case.ours}Optimizer")(
        learning_rate=learning_rate, **case.arguments
    )
    variables = [gpuopt.Variable(w) for w in start()]
    for step in gradients():
        optimizer.apply_gradients(list(zip(step, variables, strict=True)))
    if hasattr(optimizer, "evaluation_weights"):
        return [optimizer.evaluation_weights(variable) for variable in variables]
    return [variable.numpy() for variable in variables]


def peers_weights(case: Case, learning_rate: float) -> Weights:
    module, _, name = case.peer.rpartition(".")
    make = getattr(importlib.import_module(module), name)
    run = run_optax if module == "optax" else run_torch
    return run(make, learning_rate, case.settings)


def run_torch(make: Any, learning_rate: float, settings: dict[str, Any]) -> Weights:
    import torch

    parameters = [torch.tensor(w, requires_grad=True) for w in start()]
    optimizer = make(parameters, lr=learning_rate, **settings)
    averages = hasattr(optimizer, "eval")
    if averages:
        optimizer.train()
    for step in gradients():
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    if averages:
        optimizer.eval()
    return [parameter.detach().numpy() for parameter in parameters]


def run_optax(make: Any, learning_rate: float, settings: dict[str, Any]) -> Weights:
    import jax
    import optax

    with jax.enable_x64(True):
        weights = [jax.numpy.asarray(w) for w in start()]
        transformation = make(learning_rate, **settings)
        state = transformation.init(weights)
        for step in gradients():
            step = [jax.numpy.asarray(gradient) for gradient in step]
            updates, state = transformation.update(step, state, weights)
            weights = optax.apply_updates(weights, updates)
        return [np.asarray(w) for w in weights]
