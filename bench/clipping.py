"""Clipping in the step, compared with plain steps, clipping by hand and torch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import gpuopt
from bench.harness import Workload
from bench.targets import Target
from gpuopt.bench.models import list_resnet50_shapes

Step = Callable[[], object]

_RATE, _DECAY = 1e-3, 0.01
_MOST = 1.0
_PLAIN, _BY_HAND, _TORCH = "without clipping", "clip_by_global_norm", "torch clip_grad_norm_, fused"
# Longer than OpenMP's threads wait in a busy loop.
_REST_SECONDS = 0.01

TARGETS = (
    Target("clip_adam_w_16m", "ratio", _PLAIN, at_most=1.5),
    Target("clip_adam_w_16m", "ratio", _TORCH, at_most=0.9),
    Target("clip_adam_w_resnet50", "ratio", _TORCH, at_most=0.9),
)


def make_workloads() -> Iterator[Workload]:
    """Yields each workload when its turn comes, so that only one at a time is in memory."""
    shapes: dict[str, tuple[str, Sequence[tuple[int, ...]]]] = {
        "16m": ("one tensor of 16,777,216 elements", [(16 * 2**20,)]),
        "resnet50": ("the 161 tensors of a ResNet-50", list(list_resnet50_shapes())),
    }
    for name, (what, of_variables) in shapes.items():
        yield _make_step_workload(f"clip_adam_w_{name}", what, of_variables)


def _make_step_workload(name: str, what: str, shapes: Sequence[tuple[int, ...]]) -> Workload:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    make = partial(gpuopt.AdamWOptimizer, _DECAY * _RATE, _RATE)
    contenders: dict[str, Step] = {
        "gpuopt": _make_step(make(clip_norm=_MOST), gradients, list),
        _PLAIN: _make_step(make(), gradients, list),
        _BY_HAND: _make_step(
            make(), gradients, lambda given: gpuopt.clip_by_global_norm(given, _MOST)[0]
        ),
    }
    if find_spec("torch") is not None:
        contenders[_TORCH] = _make_torch_step(gradients)
    # Gradients are read twice.
    num_bytes = sum(gradient.nbytes for gradient in gradients) * 8
    return Workload(name, f"AdamW with clip_norm on {what}", num_bytes, contenders, settle=_rest)


def _make_step(
    optimizer: gpuopt.Optimizer,
    gradients: list[np.ndarray],
    clip: Callable[[list[np.ndarray]], Sequence[Any]],
) -> Step:
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
    return lambda: optimizer.apply_gradients(list(zip(clip(gradients), variables, strict=True)))


def _make_torch_step(gradients: Sequence[np.ndarray]) -> Step:
    import torch

    parameters = [torch.nn.Parameter(torch.ones(gradient.shape)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=_DECAY, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, _MOST, foreach=True)
        optimizer.step()

    return step


def _rest() -> None:
    time.sleep(_REST_SECONDS)
