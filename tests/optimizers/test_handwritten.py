"""Optimizers as they are written by hand, beside those that docs/guides/training_loop.md names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import gpuopt

pytestmark = pytest.mark.value

GRADIENTS = np.random.default_rng(0).standard_normal((40, 5))
DECAY, EPSILON, RHO = 0.01, 1e-8, 0.95
# Of numpy, because Python's numbers are rounded to float32.
LR, MU, BETA1, BETA2 = np.float64(0.1), np.float64(0.9), np.float64(0.9), np.float64(0.999)

Weights = Iterator[Any]


def descent(w: Any) -> Weights:
    for g in GRADIENTS:
        yield (w := w - LR * g)


def momentum_of_steps(w: Any) -> Weights:
    v = 0.0
    for g in GRADIENTS:
        v = MU * v - LR * g
        yield (w := w + v)


def momentum_of_gradients(w: Any, decay: float = 0.0) -> Weights:
    v = 0.0
    for g in GRADIENTS:
        v = MU * v + (g + decay * w)
        yield (w := w - LR * v)


def average_of_gradients(w: Any) -> Weights:
    v = 0.0
    for g in GRADIENTS:
        v = MU * v + (1 - MU) * g
        yield (w := w - LR * v)


def nesterov(w: Any) -> Weights:
    v = 0.0
    for g in GRADIENTS:
        old, v = v, MU * v - LR * g
        yield (w := w + (1 + MU) * v - MU * old)


def adagrad(w: Any) -> Weights:
    h = 0.0
    for g in GRADIENTS:
        h = h + g**2
        yield (w := w - LR * g / (np.sqrt(h) + EPSILON))


def rms_prop(w: Any) -> Weights:
    h = 0.0
    for g in GRADIENTS:
        h = RHO * h + (1 - RHO) * g**2
        yield (w := w - LR * g / (np.sqrt(h) + EPSILON))


def adam(w: Any, decay: float = 0.0) -> Weights:
    m = v = 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
        m_hat, v_hat = m / (1 - BETA1**t), v / (1 - BETA2**t)
        yield (w := w - LR * (m_hat / (np.sqrt(v_hat) + EPSILON) + decay * w))


def adam_with_one_factor(w: Any) -> Weights:
    m = v = 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
        factor = np.sqrt(1 - BETA2**t) / (1 - BETA1**t)
        yield (w := w - LR * factor * m / (np.sqrt(v) + EPSILON))


@pytest.mark.parametrize(
    ("handwritten", "optimizer", "tolerance"),
    [
        (descent, lambda: gpuopt.GradientDescentOptimizer(LR), 1e-14),
        (descent, lambda: gpuopt.GradientDescentOptimizer(0.1), 1e-7),
        (momentum_of_steps, lambda: gpuopt.MomentumOptimizer(LR, MU), 1e-12),
        (momentum_of_gradients, lambda: gpuopt.MomentumOptimizer(LR, MU), 1e-12),
        (average_of_gradients, lambda: gpuopt.MomentumOptimizer((1 - MU) * LR, MU), 1e-12),
        (nesterov, lambda: gpuopt.MomentumOptimizer(LR, MU, use_nesterov=True), 1e-12),
        (
            lambda w: momentum_of_gradients(w, DECAY),
            lambda: gpuopt.TorchSGDOptimizer(LR, momentum=MU, weight_decay=DECAY),
            1e-12,
        ),
        (adagrad, lambda: gpuopt.TorchAdagradOptimizer(LR, epsilon=EPSILON), 1e-12),
        (rms_prop, lambda: gpuopt.TorchRMSpropOptimizer(LR, decay=RHO, epsilon=EPSILON), 1e-12),
        (adam, lambda: gpuopt.TorchAdamWOptimizer(LR, weight_decay=0.0), 1e-12),
        (adam_with_one_factor, lambda: gpuopt.AdamOptimizer(LR), 1e-5),  # powers in float32
        (
            lambda w: adam(w, DECAY),
            lambda: gpuopt.TorchAdamWOptimizer(LR, weight_decay=DECAY),
            1e-12,
        ),
    ],
)
def test_the_guide_names_the_same_formula(
    handwritten: Callable[[Any], Weights],
    optimizer: Callable[[], gpuopt.Optimizer],
    tolerance: float,
) -> None:
    start = np.linspace(-1, 1, 5)
    w, ours = start.copy(), optimizer()
    for gradient, expected in zip(GRADIENTS, handwritten(start), strict=True):
        ours.update(w, gradient)
        np.testing.assert_allclose(w - start, expected - start, rtol=tolerance, atol=tolerance)
