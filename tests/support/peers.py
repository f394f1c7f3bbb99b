"""Runs optimizers of other libraries beside ours, in float64, and says how far apart they end.

The libraries are imported when they are needed: the table in docs/optimizers.md is written without.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import gpuopt

LIBRARIES = ["torch", "optax", "schedulefree", "lion_pytorch", "keras", "bitsandbytes"]
STEPS = 20
# Sums in another order.
ROUNDING = 1e-12
Weights = list[np.ndarray]


class Call(NamedTuple):
    """An optimizer as it is written in a program.

    Attributes:
        name: Of ours, less "Optimizer"; of a peer's, with its module.
        arguments: Beside the learning rate.
    """

    name: str
    arguments: Mapping[str, Any] = MappingProxyType({})

    def __str__(self) -> str:
        given = (f"{key}={value!r}" for key, value in self.arguments.items())
        return f"{self.name}({', '.join(given)})"


class Case(NamedTuple):
    """An optimizer of ours, and one of a peer's that is the same.

    Attributes:
        ours: Our optimizer.
        peer: The peer's.
        within: How far apart they may end after `STEPS` steps, relative to how far the peer's
            moved.
    """

    ours: Call
    peer: Call
    within: float = ROUNDING

    @property
    def identifier(self) -> str:
        return f"{self.ours} - {self.peer}"


# torch keeps a product of TorchNAdam's in float32.
OF_A_FLOAT32_PRODUCT = 1e-8

CASES = [
    Case(Call("TorchAdamW"), Call("torch.optim.AdamW")),
    Case(Call("TorchAdamW", {"epsilon": 0.1}), Call("torch.optim.AdamW", {"eps": 0.1})),
    Case(Call("TorchAdamW"), Call("optax.adamw", {"weight_decay": 0.01})),
    Case(Call("TorchAdamW", {"weight_decay": 0.0}), Call("torch.optim.Adam")),
    Case(Call("AMSGrad"), Call("torch.optim.Adam", {"amsgrad": True})),
    Case(
        Call("AMSGrad", {"epsilon": 0.1}), Call("torch.optim.Adam", {"amsgrad": True, "eps": 0.1})
    ),
    Case(Call("AMSGrad", {"form": "optax"}), Call("optax.amsgrad")),
    Case(Call("AMSGrad", {"form": "optax", "epsilon": 0.1}), Call("optax.amsgrad", {"eps": 0.1})),
    Case(Call("TorchNAdam"), Call("torch.optim.NAdam"), OF_A_FLOAT32_PRODUCT),
    Case(
        Call("TorchNAdam", {"epsilon": 0.1}),
        Call("torch.optim.NAdam", {"eps": 0.1}),
        OF_A_FLOAT32_PRODUCT,
    ),
    Case(Call("RAdam"), Call("torch.optim.RAdam")),
    Case(Call("RAdam", {"epsilon": 0.1}), Call("torch.optim.RAdam", {"eps": 0.1})),
    Case(Call("Lion", {"weight_decay": 0.1}), Call("lion_pytorch.Lion", {"weight_decay": 0.1})),
    Case(Call("Lion", {"weight_decay": 0.1}), Call("optax.lion", {"weight_decay": 0.1})),
    Case(
        Call("LAMB", {"weight_decay": 0.1, "use_nvlamb": True}),
        Call("optax.lamb", {"weight_decay": 0.1}),
    ),
    Case(
        Call("LAMB", {"epsilon": 0.1, "weight_decay": 0.1}),
        Call("optax.lamb", {"eps": 0.1, "weight_decay": 0.1}),
    ),
    Case(Call("AdaBelief"), Call("optax.adabelief")),
    Case(
        Call("AdaBelief", {"epsilon": 0.1, "epsilon_root": 0.01}),
        Call("optax.adabelief", {"eps": 0.1, "eps_root": 0.01}),
    ),
    Case(Call("TorchSGD", {"weight_decay": 0.1}), Call("torch.optim.SGD", {"weight_decay": 0.1})),
    Case(Call("TorchSGD", {"dampening": 0.3}), Call("torch.optim.SGD", {"dampening": 0.3})),
    Case(
        Call("TorchSGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
        Call("torch.optim.SGD", {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ),
    Case(
        Call("TorchSGD", {"momentum": 0.9, "weight_decay": 0.1, "use_nesterov": True}),
        Call("torch.optim.SGD", {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ),
    Case(Call("TorchRMSprop"), Call("torch.optim.RMSprop")),
    *(
        Case(
            Call("TorchRMSprop", {**settings, "decay": 0.9, "epsilon": 0.1}),
            Call(peer, {**settings, **named, "eps": 0.1}),
        )
        for settings in (
            {},
            {"momentum": 0.8},
            {"centered": True},
            {"momentum": 0.8, "centered": True},
        )
        for peer, named in (
            ("torch.optim.RMSprop", {"alpha": 0.9}),
            ("optax.rmsprop", {"decay": 0.9, "eps_in_sqrt": False}),
        )
    ),
    Case(Call("TorchAdagrad"), Call("torch.optim.Adagrad")),
    Case(
        Call(
            "TorchAdagrad",
            {"learning_rate_decay": 0.1, "epsilon": 0.1, "initial_accumulator_value": 0.2},
        ),
        Call(
            "torch.optim.Adagrad",
            {"lr_decay": 0.1, "eps": 0.1, "initial_accumulator_value": 0.2},
        ),
    ),
    Case(
        Call("ScheduleFreeSGD", {"weight_decay": 0.1}),
        Call("schedulefree.SGDScheduleFree", {"weight_decay": 0.1}),
    ),
    Case(
        Call("ScheduleFreeAdamW", {"weight_decay": 0.1}),
        Call("schedulefree.AdamWScheduleFree", {"weight_decay": 0.1}),
    ),
]


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


def relative_distance(first: Weights, second: Weights) -> float:
    """Returns how far two runs ended from each other, relative to how far the second moved."""
    return norm_of_difference(first, second) / norm_of_difference(second, start())


def norm_of_difference(first: Weights, second: Weights) -> float:
    return float(np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(first, second, strict=True))))


def our_weights(ours: Call, learning_rate: float = 0.01) -> Weights:
    make = getattr(gpuopt, f"{ours.name}Optimizer")
    optimizer = make(learning_rate=learning_rate, **ours.arguments)
    variables = [gpuopt.Variable(w) for w in start()]
    for step in gradients():
        optimizer.apply_gradients(list(zip(step, variables, strict=True)))
    if hasattr(optimizer, "evaluation_weights"):
        return [optimizer.evaluation_weights(variable) for variable in variables]
    return [variable.numpy() for variable in variables]


def peers_weights(peer: Call, learning_rate: float = 0.01) -> Weights:
    library = peer.name.partition(".")[0]
    run = {"optax": run_optax, "keras": run_keras}.get(library, run_torch)
    return run(imported(peer.name), learning_rate, peer.arguments)


def imported(name: str) -> Any:
    """Returns an optimizer of an installed library, by its name with its module."""
    # For Keras, which writes its settings into the user's home otherwise.
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("KERAS_HOME", tempfile.gettempdir())
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def run_torch(make: Any, learning_rate: float, settings: Mapping[str, Any]) -> Weights:
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


def run_optax(make: Any, learning_rate: float, settings: Mapping[str, Any]) -> Weights:
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


def run_keras(make: Any, learning_rate: float, settings: Mapping[str, Any]) -> Weights:
    import jax
    import keras

    keras.config.set_floatx("float64")
    with jax.enable_x64(True):
        weights = [keras.Variable(w, dtype="float64") for w in start()]
        optimizer = make(learning_rate=learning_rate, **settings)
        for step in gradients():
            optimizer.apply([jax.numpy.asarray(gradient) for gradient in step], weights)
        return [np.asarray(w.value) for w in weights]
