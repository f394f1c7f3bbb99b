"""A whole step with clipping, decay and a moving average, compared with plain steps and torch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

import numpy as np

import gpuopt
from bench.harness import Workload
from bench.targets import Target
from gpuopt.bench.models import list_resnet50_shapes

Step = Callable[[], object]

_RATE, _DECAY, _AVERAGE, _MOST = 1e-3, 0.01, 0.999, 1.0
_PLAIN, _APART, _TORCH = "plain Adam", "apply after it", "torch clip, AdamW fused, lerp"
# Longer than OpenMP's threads wait in a busy loop.
_REST_SECONDS = 0.01

TARGETS = (
    Target("average_adam_w_16m", "ratio", _PLAIN, at_most=1.75),
    Target("average_adam_w_16m", "ratio", _TORCH, at_most=0.8),
    Target("average_adam_w_resnet50", "ratio", _TORCH, at_most=0.8),
)


def make_workloads() -> Iterator[Workload]:
    """Yields each workload when its turn comes, so that only one at a time is in memory."""
    shapes: dict[str, tuple[str, Sequence[tuple[int, ...]]]] = {
        "16m": ("one tensor of 16,777,216 elements", [(16 * 2**20,)]),
        "resnet50": ("the 161 tensors of a ResNet-50", list(list_resnet50_shapes())),
    }
    for name, (what, of_variables) in shapes.items():
        yield _make_workload(f"average_adam_w_{name}", what, of_variables)


def _make_workload(name: str, what: str, shapes: Sequence[tuple[int, ...]]) -> Workload:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    make = partial(gpuopt.AdamWOptimizer, _DECAY * _RATE, _RATE, clip_norm=_MOST)
    averages, apart = (gpuopt.ExponentialMovingAverage(_AVERAGE) for _ in range(2))
    contenders: dict[str, Step] = {
        "gpuopt": _make_step(make(averages=averages), gradients),
        _PLAIN: _make_step(gpuopt.AdamOptimizer(_RATE), gradients),
        _APART: _make_step(make(), gradients, apart),
    }
    if find_spec("torch") is not None:
        contenders[_TORCH] = _make_torch_step(gradients)
    # Gradients are read twice, the variable, its slots and its average read and written.
    num_bytes = sum(gradient.nbytes for gradient in gradients) * 10
    return Workload(
        name,
        f"AdamW with clip_norm and averages on {what}",
        num_bytes,
        contenders,
        settle=partial(time.sleep, _REST_SECONDS),
    )


def _make_step(
    optimizer: gpuopt.Optimizer,
    gradients: list[np.ndarray],
    apart: gpuopt.ExponentialMovingAverage | None = None,
) -> Step:
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]

    def step() -> None:
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
        if apart is not None:
            apart.apply(variables)

    return step


def _make_torch_step(gradients: Sequence[np.ndarray]) -> Step:
    import torch

    parameters = [torch.nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY, fused=True)
    averages = [parameter.detach().clone() for parameter in parameters]
    values = [parameter.detach() for parameter in parameters]

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, _MOST, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(averages, values, 1 - _AVERAGE)

    return step
