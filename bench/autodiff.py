"""What differentiation costs beside autograd as it is installed, and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import autograd
import autograd.core
import autograd.numpy
import numpy as np

import gpuopt
from bench.harness import Workload
from gpuopt.autodiff import engine_of

# autograd's own derivatives, before gpuopt registers some of them again.
_AUTOGRADS = dict(autograd.core.primitive_vjps)
_PAIRS = 100
_LAYERS, _WIDTH, _BATCH = 6, 512, 256


def workloads() -> Iterator[Workload]:
    yield _elementwise(0)
    yield _elementwise(_PAIRS)
    yield _perceptron()


def _elementwise(num_pairs: int) -> Workload:
    """One product, or then pairs of a product and a sum, of 8 elements: all of it is overhead."""

    def chain(x: Any) -> Any:
        x = x * x
        for _ in range(num_pairs):
            x = x * 0.9 + 0.1
        return x

    values = np.linspace(0.1, 0.9, 8, dtype=np.float32)
    variable = gpuopt.Variable(values)

    def loss() -> Any:
        return chain(variable)

    contenders = {
        "gpuopt": lambda: engine_of(loss).compute(loss),
        "autograd": _as_installed(autograd.elementwise_grad(chain), values),
    }
    if find_spec("torch") is not None:
        import torch

        leaf = torch.from_numpy(values).requires_grad_()
        ones = torch.ones(8)
        contenders["torch eager"] = lambda: torch.autograd.grad(chain(leaf), leaf, ones)
    operations = 1 + 2 * num_pairs
    return Workload(
        name=f"gradient_of_{operations}_operations",
        description=f"Gradient of {operations} operation(s) on 8 float32 elements",
        bytes_moved=None,
        contenders=contenders,
        operations=operations,
    )


def _perceptron() -> Workload:
    rng = np.random.default_rng(0)
    weights = [
        rng.normal(scale=_WIDTH**-0.5, size=(_WIDTH, _WIDTH)).astype(np.float32)
        for _ in range(_LAYERS)
    ]
    images = rng.normal(size=(_BATCH, _WIDTH)).astype(np.float32)
    variables = [gpuopt.Variable(weight) for weight in weights]

    def forward(xp: Any, layers: Any, inputs: Any) -> Any:
        for layer in layers:
            inputs = xp.tanh(inputs @ layer)
        return xp.mean(inputs * inputs)

    def loss() -> Any:
        return forward(np, variables, images)

    def loss_of(layers: Any) -> Any:
        return forward(autograd.numpy, layers, images)

    contenders = {
        "gpuopt": lambda: engine_of(loss).compute(loss),
        "autograd": _as_installed(autograd.grad(loss_of), weights),
    }
    if find_spec("torch") is not None:
        import torch

        leaves = [torch.from_numpy(weight).requires_grad_() for weight in weights]
        inputs = torch.from_numpy(images)
        contenders["torch eager"] = lambda: torch.autograd.grad(
            forward(torch, leaves, inputs), leaves
        )
    return Workload(
        name="gradient_of_perceptron",
        description=f"Gradients of {_LAYERS} layers of {_WIDTH} by {_WIDTH}, batch of {_BATCH}",
        bytes_moved=None,
        contenders=contenders,
    )


def _as_installed(gradient: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
    """Makes a step that differentiates by autograd's own derivatives."""

    def step() -> Any:
        ours = autograd.core.primitive_vjps
        autograd.core.primitive_vjps = _AUTOGRADS
        try:
            return gradient(argument)
        finally:
            autograd.core.primitive_vjps = ours

    return step
