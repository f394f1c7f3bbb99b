"""The cost of differentiation, compared with autograd alone and with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import autograd
import autograd.numpy
import numpy as np

import gpuopt
from bench.harness import Offer
from gpuopt.autodiff import engine_of
from gpuopt.bench.workloads import Workload

_LAYERS, _WIDTH, _BATCH = 6, 512, 256


def _make_elementwise_workload(num_pairs: int) -> Workload:
    """Differentiates a product and `num_pairs` pairs of product and sum, of 8 elements.

    There is almost nothing to compute, so all the time is overhead.
    """

    def chain(x: Any) -> Any:
        x = x * x
        for _ in range(num_pairs):
            x = x * 0.9 + 0.1
        return x

    values = np.linspace(0.1, 0.9, 8, dtype=np.float32)
    variable = gpuopt.Variable(values)

    def loss() -> Any:
        return chain(variable)

    contenders: dict[str, Callable[[], object]] = {
        "gpuopt": lambda: engine_of(loss).compute(loss),
        "autograd": partial(autograd.elementwise_grad(chain), values),
    }
    if find_spec("torch") is not None:
        import torch

        leaf = torch.from_numpy(values).requires_grad_()
        ones = torch.ones(8)
        contenders["torch eager"] = lambda: torch.autograd.grad(chain(leaf), leaf, ones)
    operations = 1 + 2 * num_pairs
    return Workload(
        f"Gradient of {operations} operation(s) on 8 float32 elements",
        contenders,
        per="operation",
        units=operations,
    )


def _make_perceptron_workload() -> Workload:
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

    contenders: dict[str, Callable[[], object]] = {
        "gpuopt": lambda: engine_of(loss).compute(loss),
        "autograd": partial(autograd.grad(loss_of), weights),
    }
    if find_spec("torch") is not None:
        import torch

        leaves = [torch.from_numpy(weight).requires_grad_() for weight in weights]
        inputs = torch.from_numpy(images)
        contenders["torch eager"] = lambda: torch.autograd.grad(
            forward(torch, leaves, inputs), leaves
        )
    what = f"Gradients of {_LAYERS} layers of {_WIDTH} by {_WIDTH}, batch of {_BATCH}"
    return Workload(what, contenders)


OFFERS = (
    Offer("gradient_of_1_operations", partial(_make_elementwise_workload, 0)),
    Offer("gradient_of_201_operations", partial(_make_elementwise_workload, 100)),
    Offer("gradient_of_perceptron", _make_perceptron_workload),
)
