"""What a newcomer from another library meets first: errors that say what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt.optimizers.base import RuleOptimizer

pytestmark = pytest.mark.contract

PAIRS = r"zip\(gradients, variables\); update\(params, grads\) takes lists and dicts"


def array(shape: Any = 2, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def adam() -> gpuopt.Optimizer:
    return gpuopt.AdamOptimizer(0.1)


class WithoutInit(RuleOptimizer):
    rule = gpuopt.AdamOptimizer.rule


class Layer:
    def __init__(self) -> None:
        self.W = array()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adam().apply_gradients([array()], [array()]), PAIRS),  # type: ignore[list-item]
        (lambda: adam().apply_gradients({"w": array()}, {"w": array()}), PAIRS),  # type: ignore[arg-type]
        (lambda: adam().apply_gradients({"w": array()}), PAIRS),  # type: ignore[arg-type]
        (lambda: adam().apply_gradients(zip({"w": array()}, {"w": array()}, strict=True)), PAIRS),
        (lambda: adam().apply_gradients([([array()], [array()])]), PAIRS),
        (lambda: adam().apply_gradients([array(), array()]), PAIRS),  # type: ignore[list-item]
        (lambda: gpuopt.AdamOptimizer(lr=0.1), "takes no lr: it calls that learning_rate"),  # type: ignore[call-arg]
        (lambda: gpuopt.AdamOptimizer(betas=(0.9, 0.9)), "takes no betas: .* beta1 and beta2"),  # type: ignore[call-arg]
        (lambda: gpuopt.AdamOptimizer(eps=1e-8), "takes no eps: it calls that epsilon"),  # type: ignore[call-arg]
        (lambda: gpuopt.AdamOptimizer(b1=0.9), "takes no b1: it calls that beta1"),  # type: ignore[call-arg]
        (lambda: gpuopt.RMSPropOptimizer(0.1, rho=0.9), "takes no rho: it calls that decay"),  # type: ignore[call-arg]
        (
            lambda: gpuopt.AdamOptimizer(params=[array()]),  # type: ignore[call-arg]
            "takes no params: variables come with their gradients",
        ),
        (lambda: gpuopt.AdamOptimizer(weight_decay=0.1), "no weight decay: AdamWOptimizer"),  # type: ignore[call-arg]
        (lambda: gpuopt.AdamOptimizer([array()], 0.1), "variables come with their gradients"),
        (lambda: gpuopt.Saver([gpuopt.Variable(1.0)], adam()), r"optimizers=\[optimizer\]"),  # type: ignore[arg-type]
        (
            lambda: adam().apply_gradients([(array((1, 2)), array())]),
            r"gradient.reshape\(\(2,\)\), or by .sum\(axis=0\)",
        ),
        (
            lambda: adam().update([array((3, 1))], [array(3)]),
            r"variable has shape \(3, 1\). Pass gradient.reshape\(\(3, 1\)\)\.",
        ),
        (
            lambda: adam().apply_gradients([(array(2, np.complex64), array(2, np.complex64))]),
            r"w.view\(np.float32\) trains real and imaginary parts apart",
        ),
        (lambda: adam().update([Layer()], [array()]), "got Layer; of an object .* pass the arrays"),
        (lambda: adam().update({"b": np.float32(0)}, {"b": 1.0}), r"gpuopt.Variable\(value\)"),
        (lambda: WithoutInit(0.1), r"define __init__\(self, learning_rate, \*\*common\)"),  # type: ignore[arg-type]
        (lambda: gpuopt.train, "gpuopt.AdamOptimizer: see .Coming from TensorFlow"),
        (lambda: gpuopt.optim, "gpuopt.AdamOptimizer: see .Coming from PyTorch"),
    ],
)
def test_the_error_says_what_to_write_instead(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call()


def test_an_unknown_hyperparameter_is_named_beside_the_known() -> None:
    hyperparameters: Any = adam().hyperparameters
    with pytest.raises(KeyError, match="no 'lr'; there are learning_rate, beta1, beta2"):
        hyperparameters["lr"] *= 0.5
    assert "lr" not in hyperparameters


def test_gradients_of_other_dtypes_are_listed_together() -> None:
    names = ["first", "second", "third"]
    variables = [gpuopt.Variable(array(), name=name) for name in names]
    gradients = [array(2, np.float64), array(), array(2, np.float64)]
    with pytest.raises(TypeError) as caught:
        adam().apply_gradients(zip(gradients, variables, strict=True))
    message = str(caught.value)
    assert message.startswith("2 gradients have a wrong dtype: grads_and_vars[0]: ")
    assert 'gradient for "first" has dtype float64; the variable has dtype float32; ' in message
    assert 'grads_and_vars[2]: gradient for "third" has dtype float64' in message
    assert "second" not in message
    assert message.endswith(
        "dtype float32. No gradient is cast: use gradient.astype(...), or pass "
        'gradient_dtype="cast" to the optimizer, for floats.'
    )


def test_a_complex_array_is_trained_by_its_view() -> None:
    w = np.array([1 + 2j], np.complex64)
    gradient = np.array([3 - 1j], np.complex64)
    optimizer = gpuopt.GradientDescentOptimizer(0.5)
    optimizer.apply_gradients([(gradient.view(np.float32), w.view(np.float32))])
    np.testing.assert_array_equal(w, [1 + 2j - 0.5 * (3 - 1j)])


def test_a_report_that_is_not_open_says_how_it_is_used() -> None:
    assert "with optimizer.report() as report" in repr(adam().report())
