"""Variables that are written while a loss runs: gradients see what the loss has read, or refuse."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from losses import Gate, Language, gradients_of, sgd

import gpuopt
from gpuopt import Variable
from gpuopt.autodiff.autograd_engine import AutogradEngine

REFUSED = r'"{}" would be written in a loss that has computed with its present value'


def ones(language: Language, name: str, value: float = 1.0) -> Variable:
    return language.place(Variable(np.full(2, value, np.float32), name=name))


def assign(variable: Variable) -> None:
    variable.assign(np.full(2, 50.0, np.float32))


def add_in_place(variable: Variable) -> None:
    variable += 1.0


def write_item(variable: Variable) -> None:
    variable[0] = 7.0


WRITES: dict[str, Callable[[Variable], Any]] = {
    "assign": assign,
    "assign_add": lambda variable: variable.assign_add(np.ones(2, np.float32)),
    "assign_sub": lambda variable: variable.assign_sub(np.ones(2, np.float32)),
    "+=": add_in_place,
    "item": write_item,
    "out": lambda variable: np.add(np.ones(2), 1.0, out=variable, casting="unsafe"),
    "add.at": lambda variable: np.add.at(variable, [0], 1.0),
    "copyto": lambda variable: np.copyto(variable, 6.0),
    "fill": lambda variable: np.putmask(variable, [True, False], 6.0),
    "apply_gradients": lambda v: sgd().apply_gradients([(np.ones(2, np.float32), v)]),
    "minimize": lambda variable: sgd().minimize(
        lambda: np.sum(variable * 1.0), var_list=[variable]
    ),
    "streaming minimize": lambda variable: sgd().minimize(
        lambda: np.sum(variable * 1.0), var_list=[variable], gate_gradients=Gate.GATE_NONE
    ),
}


@pytest.mark.parametrize("role", ["differentiated", "constant"])
@pytest.mark.parametrize("name", WRITES)
def test_a_variable_is_not_written_after_the_loss_has_computed_with_it(
    name: str, role: str
) -> None:
    w, other = Variable([3.0, 3.0], name="w"), Variable([2.0, 2.0], name="other")

    def loss() -> Any:
        y = np.sum(w * other)
        WRITES[name](w)
        return y

    with pytest.raises(RuntimeError, match=REFUSED.format("w")):
        gradients_of(loss, *([w, other] if role == "differentiated" else [other]))
    assert w.numpy().tolist() == [3, 3]


@pytest.mark.parametrize("name", WRITES)
def test_a_variable_may_be_written_before_the_loss_reads_it(name: str) -> None:
    w, other = Variable([3.0, 3.0], name="w"), Variable([2.0, 2.0], name="other")

    def loss() -> Any:
        WRITES[name](w)
        return np.sum(w * other)

    [gradient] = gradients_of(loss, other)
    assert gradient.tolist() == w.numpy().tolist() != [3, 3]


def test_every_engine_refuses(language: Language) -> None:
    w, mean = ones(language, "w"), ones(language, "mean")
    new = language.put(np.full(2, 50, np.float32))

    def loss() -> Any:
        y = (w * mean).sum()
        mean.storage[...] = mean.storage  # is not seen
        mean.assign(new)
        return y

    for var_list in ([w], [w, mean], [mean]):
        with pytest.raises(RuntimeError, match=REFUSED.format("mean")):
            gradients_of(language.mark(loss), *var_list)


def test_what_was_read_and_not_computed_with_may_be_written() -> None:
    w = Variable([3.0, 3.0], name="w")
    count = Variable(1, name="count")

    def loss() -> Any:
        share = 1.0 / (count + 1)  # a number of its own
        count.assign_add(1)
        return np.sum(w * share)

    [gradient] = gradients_of(loss, w)
    assert gradient.tolist() == [0.5, 0.5]


def test_a_constant_that_only_a_lost_part_used_may_be_written() -> None:
    w, mean = Variable([3.0, 3.0], name="w"), Variable([2.0, 2.0], name="mean", trainable=False)

    def loss() -> Any:
        np.sum(w * mean.numpy())
        mean.assign([5.0, 5.0])
        return np.sum(w * mean)

    [gradient] = gradients_of(loss, w)
    assert gradient.tolist() == [5, 5]


def test_storage_is_watched_too_and_so_is_memory_under_another_name() -> None:
    w, mean = Variable([3.0, 3.0], name="w"), Variable([2.0, 2.0], name="mean")
    twin = Variable(mean.storage, name="twin", copy=False)

    def of_storage() -> Any:
        y = np.sum(w * mean.storage)
        mean.assign([5.0, 5.0])
        return y

    with pytest.raises(RuntimeError, match=REFUSED.format("mean")):
        gradients_of(of_storage, w)

    def of_twin() -> Any:
        y = np.sum(w * mean)
        twin.assign([5.0, 5.0])
        return y

    for var_list in ([w], [w, mean]):
        with pytest.raises(RuntimeError, match=REFUSED.format("twin")):
            gradients_of(of_twin, *var_list)
    assert mean.numpy().tolist() == [2, 2]


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, constant: np.where(constant > 0, x, 0.0) * constant,
        lambda x, constant: np.concatenate([x, constant]) ** 2,
        lambda x, constant: np.sum(x, where=constant > 1) + np.cross(x, constant[:]).sum(),
        lambda x, constant: np.einsum("i,i", x, constant.storage[:]),
        lambda x, constant: np.stack([x, constant.storage]).prod(),
    ],
)
def test_gradients_are_right_or_refused_however_a_constant_was_used(expression: Any) -> None:
    x, constant = Variable([1.0, 2.0, 3.0]), Variable([2.0, 3.0, 4.0], name="constant")
    [expected] = gradients_of(lambda: expression(x, constant), x)

    def loss() -> Any:
        y = expression(x, constant)
        constant.assign([0.0, -1.0, 9.0])
        return y

    with suppress(RuntimeError):
        np.testing.assert_allclose(gradients_of(loss, x)[0], expected)


def test_a_minimize_inside_a_loss_may_train_what_the_loss_reads_later() -> None:
    a, b = Variable([2.0], name="a"), Variable([3.0], name="b")

    def loss() -> Any:
        sgd(1.0).minimize(lambda: np.sum(b * b), var_list=[b])
        return np.sum(a * b)

    [gradient] = gradients_of(loss, a)
    assert gradient.tolist() == b.numpy().tolist() == [-3]


def test_an_inner_loss_refuses_for_the_outer_one() -> None:
    a, b = Variable([2.0], name="a"), Variable([3.0], name="b")

    def inner() -> Any:
        b.assign([4.0])
        return np.sum(a * 2.0)

    def loss() -> Any:
        return np.sum(a * b) + np.sum(gradients_of(inner, a)[0])

    with pytest.raises(RuntimeError, match=REFUSED.format("b")):
        gradients_of(loss, a)


def test_after_the_loss_variables_may_be_written_again() -> None:
    w = Variable([3.0], name="w")
    value, pairs = AutogradEngine().compute(lambda: np.sum(w * w))
    w.assign([4.0])
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients(pairs)
    assert (float(value), w.numpy().tolist()) == (9.0, [-2.0])
