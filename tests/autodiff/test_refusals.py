"""What would lose a gradient, or is no loss: refused with words that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from losses import Language, gradients_of, sgd

import gpuopt
from gpuopt import Variable

pytestmark = pytest.mark.contract

_BUFFER = np.zeros(3, np.float32)


def add_into_an_array(w: Variable) -> Any:
    total = np.zeros(3, np.float32)
    total += w * 2
    return total


def write_an_item(w: Variable) -> Any:
    doubled = w * 2
    doubled[0] = 1.0
    return doubled


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "float": (lambda w: float(np.sum(w)), TypeError, r"float\(\) would .* lose its gradient"),
    "int": (lambda w: int(w[0] * 1), TypeError, r"int\(\) would .* lose its gradient"),
    "item": (lambda w: (w[0] * 1).item(), TypeError, r"item\(\) would .* lose its gradient"),
    "tolist": (lambda w: (w * 1).tolist(), TypeError, r"tolist\(\) would .* lose its gradient"),
    "math": (lambda w: math.exp(w[0]), TypeError, r"float\(\) would .* lose its gradient"),
    "asarray": (lambda w: np.asarray(w * 2), TypeError, "lose its gradient.*numpy.stack"),
    "array of elements": (lambda w: np.array([w[0], w[1]]), TypeError, "numpy.stack"),
    "dot of an array": (lambda w: np.ones(3).dot(w), TypeError, "a @ b"),
    "dot of an array and a box": (lambda w: np.ones(3).dot(w * 1), TypeError, "a @ b"),
    "out": (lambda w: np.add(w, w, out=_BUFFER), NotImplementedError, "numpy.add .*'out'"),
    "out of sum": (
        lambda w: np.sum(w, out=np.zeros((), np.float32)),
        NotImplementedError,
        "numpy.sum .*'out'",
    ),
    "out of fft": (
        lambda w: np.real(np.fft.fft(w, out=np.zeros(3, complex))),
        NotImplementedError,
        "numpy.fft.fft .*'out'",
    ),
    "out of autograd's": (
        lambda w: anp.multiply(w, 2.0, out=np.zeros(3)),
        NotImplementedError,
        "numpy.multiply .*'out'",
    ),
    "+= of an array": (add_into_an_array, NotImplementedError, r"a = a \+ b"),
    "item assignment": (write_an_item, TypeError, "cannot be written.*numpy.where"),
    "no derivative": (lambda w: np.ptp(w * 1), NotImplementedError, "numpy.ptp has no derivative"),
    "of a ufunc": (lambda w: np.cbrt(w), NotImplementedError, "numpy.cbrt has no derivative"),
    "two results": (lambda w: np.modf(w)[0], NotImplementedError, "numpy.modf has no derivative"),
    "reduce": (lambda w: np.multiply.reduce(w * 1), NotImplementedError, "no derivative"),
    "in a list": (lambda w: np.block([w * 1, w]), NotImplementedError, "numpy.block has no"),
    "None": (lambda w: None, TypeError, "the loss returned None"),
    "a tuple": (lambda w: (np.sum(w), 3), TypeError, "the loss returned tuple, not one number"),
    "a list": (lambda w: [w * 2], TypeError, "the loss returned list"),
    "a dictionary": (lambda w: {"loss": w * 2}, TypeError, "the loss returned dict"),
    "text": (lambda w: f"{np.sum(w)}", TypeError, "the loss returned str"),
    "parts": (lambda w: np.split(w * 1, 3), TypeError, "the loss returned .*not one number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_the_message_says_why(name: str) -> None:
    loss, error, message = REFUSED[name]
    w = Variable([1.0, 2.0, 3.0], name="w")
    with pytest.raises(error, match=message):
        sgd().minimize(lambda: loss(w))
    assert w.numpy().tolist() == [1, 2, 3]
    assert _BUFFER.tolist() == [0, 0, 0]


def test_values_can_be_printed_in_a_loss() -> None:
    w = Variable([1.5, 2.0], name="w")
    texts = []

    def loss() -> Any:
        total = np.sum(w)
        texts.extend([f"{total:.2f}", f"{w[0]}", str(total > 3)])
        return total

    gradients_of(loss)
    assert texts == ["3.50", "1.5", "True"]
    assert f"{Variable(1.5):.2f}" == "1.50"
    assert f"{w}" == str(w)


def test_a_loss_that_returns_none_is_refused_by_every_engine(language: Language) -> None:
    w = language.place(Variable(np.ones(3, np.float32)))

    def forgotten() -> None:
        (w * 2).sum()

    with pytest.raises(TypeError, match="the loss returned None"):
        gradients_of(language.mark(forgotten))


def test_a_loss_without_variables_is_refused_by_every_engine(language: Language) -> None:
    array = language.put(np.ones(3, np.float32))
    with pytest.raises(
        ValueError, match=r"No variables to optimize.*read no trainable one.*are constants"
    ):
        gradients_of(language.mark(lambda: (array * 2).sum()))


@pytest.mark.torch
def test_a_loss_of_torchs_own_parameters_alone_is_refused() -> None:
    import torch

    own = torch.ones(3, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"No variables to optimize.*read no trainable one.*are constants"
    ) as raised:
        sgd().minimize(gpuopt.with_torch(lambda: (own * 2).sum()))
    hint = str(raised.value).partition("read no trainable one")[2]
    assert "with_torch" not in hint  # which is what the loss was marked by
    assert "gradients_of_module" in hint


def test_a_loss_that_brings_no_gradients_is_refused_as_such() -> None:
    with pytest.raises(ValueError, match=r"No variables to optimize: .* brought no gradients"):
        sgd().minimize(gpuopt.with_gradients(lambda: (1.0, {})))
