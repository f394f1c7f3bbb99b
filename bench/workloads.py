"""The jobs that are timed, and what a user would take instead of gpuopt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib.util import find_spec

import numpy as np

import gpuopt
from bench import autodiff, distributed
from bench.checkpoints import restore_checkpoint, save_checkpoint
from bench.harness import Workload

_ELEMENTS = 16 * 2**20
_TENSORS = 4


def workloads(pattern: str = "*") -> Iterator[Workload]:
    """Makes each workload when its turn has come, so that only one is in memory.

    Args:
        pattern: Of the names of those that take long to make.
    """
    for make in (dense_adam_float32, save_checkpoint, restore_checkpoint):
        if fnmatch(make.__name__, pattern):
            yield make()
    yield from autodiff.workloads()
    yield from distributed.workloads()


def dense_adam_float32() -> Workload:
    """Adam in float32 on a few large tensors, where only the memory's speed should count."""
    rng = np.random.default_rng(0)
    shape = (_ELEMENTS // _TENSORS,)
    gradients = [rng.standard_normal(shape, np.float32) for _ in range(_TENSORS)]
    contenders: dict[str, Callable[[], object]] = {
        "gpuopt": _gpuopt_adam(gradients),
        "numpy, the formula": _formula_adam(gradients),
    }
    if find_spec("torch") is not None:
        contenders["torch fused"] = _torch_adam(gradients, fused=True)
        contenders["torch foreach"] = _torch_adam(gradients, foreach=True)
    return Workload(
        name="dense_adam_float32",
        description=f"Adam on {_TENSORS} tensors of {shape[0]:,} float32 elements each",
        # The weight and both slots are read and written, the gradient is read.
        bytes_moved=_ELEMENTS * 4 * 7,
        contenders=contenders,
    )


def _gpuopt_adam(gradients: list[np.ndarray]) -> Callable[[], object]:
    variables = [gpuopt.Variable(np.ones_like(gradient)) for gradient in gradients]
    optimizer = gpuopt.AdamOptimizer(1e-3)
    pairs = list(zip(gradients, variables, strict=True))
    return lambda: optimizer.apply_gradients(pairs)


def _formula_adam(gradients: list[np.ndarray]) -> Callable[[], object]:
    """What one writes down from the paper."""
    state = [(np.ones_like(g), np.zeros_like(g), np.zeros_like(g)) for g in gradients]
    steps = 0

    def step() -> None:
        nonlocal state, steps
        steps += 1
        moved = []
        for (w, m, v), g in zip(state, gradients, strict=True):
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g**2
            m_hat, v_hat = m / (1 - 0.9**steps), v / (1 - 0.999**steps)
            moved.append((w - 1e-3 * m_hat / (np.sqrt(v_hat) + 1e-8), m, v))
        state = moved

    return step


def _torch_adam(gradients: list[np.ndarray], **implementation: bool) -> Callable[[], object]:
    import torch

    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.ones(gradient.shape))
        parameter.grad = torch.from_numpy(gradient)
        parameters.append(parameter)
    optimizer = torch.optim.Adam(parameters, lr=1e-3, **implementation)
    return lambda: optimizer.step()
