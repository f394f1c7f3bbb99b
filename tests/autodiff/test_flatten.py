"""autograd's own functions of lists and dictionaries, on those with Variables."""

from __future__ import annotations

from typing import Any

import numpy as np
from autograd.misc.flatten import flatten

from gpuopt import GradientDescentOptimizer, Variable


def variables() -> tuple[Variable, Variable]:
    return Variable(np.arange(6.0).reshape(2, 3), name="w"), Variable(np.ones(3), name="b")


def gradients(loss: Any) -> list[np.ndarray]:
    return [g for g, _ in GradientDescentOptimizer(0.1).compute_gradients(loss)]


def test_variables_are_flattened_outside_of_a_loss() -> None:
    w, b = variables()
    flat, unflatten = flatten([w, {"b": (b, 2.0)}])
    np.testing.assert_array_equal(flat, [0, 1, 2, 3, 4, 5, 1, 1, 1, 2])
    plain, of_name = unflatten(flat + 1)
    np.testing.assert_array_equal(plain, w.numpy() + 1)
    np.testing.assert_array_equal(of_name["b"][0], [2, 2, 2])


def test_a_loss_is_differentiated_through_flatten() -> None:
    w, b = variables()
    of_w, of_b = gradients(lambda: np.sum(flatten([w, {"x": (b, 2 * w)}])[0] ** 2))
    np.testing.assert_array_equal(of_w, 10 * w.numpy())
    np.testing.assert_array_equal(of_b, 2 * b.numpy())


def test_a_loss_is_differentiated_through_unflatten() -> None:
    w, b = variables()

    def loss() -> Any:
        flat, unflatten = flatten([w, (b,)])
        doubled, (other,) = unflatten(2 * flat)
        return np.sum(doubled**2) + np.sum(other)

    of_w, of_b = gradients(loss)
    np.testing.assert_array_equal(of_w, 8 * w.numpy())
    np.testing.assert_array_equal(of_b, [2, 2, 2])


def test_gradients_of_flattened_float32_are_float32() -> None:
    w = Variable(np.ones(3, np.float32))
    [gradient] = gradients(lambda: np.sum(flatten([w])[0] ** 2))
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, [2, 2, 2])
