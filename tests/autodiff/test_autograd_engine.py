"""Losses in numpy's functions, differentiated by HIPS autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from every_optimizer import CONFIGURATIONS, make
from losses import gradients_of, sgd

from gpuopt import Variable


def test_operators_and_numpy_functions_take_variables() -> None:
    w, b = Variable([[1.0, 2.0], [3.0, 4.0]], name="w"), Variable([0.5, -0.5], name="b")
    x = np.array([[1.0, 2.0]])
    losses: list[tuple[Callable[[], Any], Any]] = [
        (lambda: np.sum(x @ w), [[1, 1], [2, 2]]),
        (lambda: np.sum(w.T @ x.T), [[1, 1], [2, 2]]),
        (lambda: np.sum(w[0] * 3), [[3, 3], [0, 0]]),
        (lambda: np.sum(-w + 1 - w / 2), [[-1.5, -1.5], [-1.5, -1.5]]),
        (lambda: np.sum(1 / w**2), [[-2, -0.25], [-2 / 27, -1 / 32]]),
        (lambda: np.sum(np.concatenate([w, w])), [[2, 2], [2, 2]]),
        (lambda: np.sum(np.stack([w[0], w[1]]) @ b), [[0.5, -0.5], [0.5, -0.5]]),
        (lambda: np.sum(np.where(w > 2, w, 0)), [[0, 0], [1, 1]]),
        (lambda: anp.sum(anp.dot(x, w)), [[1, 1], [2, 2]]),
        (lambda: anp.sum(anp.array([w[0, 0], w[1, 1]])), [[1, 0], [0, 1]]),
        (lambda: np.sum(np.abs(w)) + abs(b).sum(), [[1, 1], [1, 1]]),
    ]
    for loss, expected in losses:
        [gradient] = gradients_of(loss, w)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "conversion",
    [
        lambda w: np.asarray(w),
        lambda w: np.array([w, w]),
        lambda w: np.array(w * 2),
        lambda w: np.array([w[0], w[1]]),
    ],
)
def test_what_would_lose_a_gradient_in_silence_is_refused(conversion: Any) -> None:
    w = Variable([1.0, 2.0], name="w")
    with pytest.raises(TypeError, match="gradient"):
        gradients_of(lambda: np.sum(conversion(w)), w)


def test_numpy_copies_are_constants() -> None:
    a, b = Variable([2.0], name="a"), Variable([3.0], name="b")
    [of_a, of_b] = gradients_of(lambda: np.sum(a * b.numpy()), a, b)
    assert of_a.tolist() == [3]
    assert of_b is None


def test_a_loss_may_differentiate_another() -> None:
    a, b = Variable([2.0], name="a"), Variable([5.0], name="b")

    def outer() -> Any:
        [inner] = gradients_of(lambda: np.sum(a * b * b), b)  # 2ab
        slope = autograd.elementwise_grad(lambda x: x**3)(a.value())  # 3a^2
        return np.sum(inner * inner + slope)

    of_a, of_b = gradients_of(outer, a, b)  # of 4a^2 b^2 + 3a^2
    assert of_a.tolist() == [8 * 2 * 25 + 6 * 2]
    assert of_b.tolist() == [8 * 4 * 5]


def test_gradients_may_share_memory_and_no_optimizer_writes_into_them() -> None:
    a, b = Variable(np.ones(3, np.float32)), Variable(np.ones(3, np.float32))
    pairs = sgd().compute_gradients(lambda: a + b)
    assert np.shares_memory(pairs[0][0], pairs[1][0])
    [spread] = gradients_of(lambda: np.sum(a.value()))
    before = [pairs[0][0].copy(), spread.copy()]
    for _, name, arguments in CONFIGURATIONS:
        optimizer = make(name, arguments)
        optimizer.apply_gradients(pairs)
        optimizer.apply_gradients([(spread, a)])
        assert [pairs[0][0].tolist(), spread.tolist()] == [array.tolist() for array in before]


@pytest.mark.parametrize(
    "method",
    [
        lambda w: w.sum(),
        lambda w: w.sum(axis=0) * 2,
        lambda w: w.mean(axis=1, keepdims=True),
        lambda w: w.prod() + w.var() + w.std(ddof=1),
        lambda w: w.max(axis=1) - w.min(),
        lambda w: w.dot(np.float32([[1], [2]])),
        lambda w: w.dot(w),
        lambda w: w.reshape(4) * w.reshape(-1) + w.reshape((4,)),
        lambda w: w.transpose(1, 0) @ w.transpose() + w.swapaxes(0, 1),
        lambda w: w.ravel() * w.flatten("F"),
        lambda w: w.astype(np.float64) * np.array([1.0, 2.0]),
        lambda w: w.clip(1.5, 3.5) + w.cumsum(axis=0) + w.trace() + w.diagonal(),
        lambda w: w.take([0, 2]) + w.repeat(2, axis=1)[0, :2] + w[None].squeeze(0),
        lambda w: w * (w.argmax() + w.argmin(axis=0)) * w.all() + w.round() * w.any(),
        lambda w: w.clip(2.0) + w.clip(max=3.0),
        lambda w: np.pad(w, 1),
        lambda w: +w * 1.0 + w // 2,
    ],
)
def test_methods_of_a_variable_and_of_what_it_reads_as_are_an_arrays(method: Any) -> None:
    values = np.float32([[1.2, 2.3], [3.1, 4.4]])
    w = Variable(values)
    np.testing.assert_array_equal(method(w), method(values))
    [direct] = gradients_of(lambda: np.sum(method(w)))
    [through_a_box] = gradients_of(lambda: np.sum(method(w * 1.0)))
    assert direct.tolist() == through_a_box.tolist()
    step = 1e-3
    for index in np.ndindex(2, 2):
        ahead, behind = values.astype(float), values.astype(float)
        ahead[index] += step
        behind[index] -= step
        slope = (np.sum(method(ahead)) - np.sum(method(behind))) / (2 * step)
        assert direct[index] == pytest.approx(slope, rel=1e-4)
