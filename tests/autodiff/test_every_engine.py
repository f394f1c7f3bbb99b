"""What every engine promises, in each language that a loss may be written in."""

from __future__ import annotations

import threading
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from losses import Gate, Language, Model, dense, gradients_of, sgd, to_stand_in

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.step.replica_context import ReplicaContext, in_replica
from gpuopt.variables.recording import recorder

pytestmark = pytest.mark.value


def test_gradients_of_a_model_are_right(language: Language) -> None:
    model = Model(language)
    pairs = sgd().compute_gradients(model.loss, list(model.variables.values()))
    gradients = {variable.name: gradient for gradient, variable in pairs}
    assert list(gradients) == list(model.variables)
    assert gradients.pop("unused") is None
    assert isinstance(gradients["table"], IndexedSlices)
    assert gradients["table"].values.shape == (4, 3)
    for name, gradient in gradients.items():
        assert gradient.dtype == np.float32
        expected = model.expected(name)
        got = dense(gradient, language.get)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max(), name
        if language.place is to_stand_in:
            parts = gradient if isinstance(gradient, IndexedSlices) else None
            arrays = [parts.values, parts.indices] if parts else [gradient]
            assert all(isinstance(array, fake_cupy.ndarray) for array in arrays)


def test_the_value_of_a_loss_comes_with_the_gradients_of_one_run(language: Language) -> None:
    w = language.place(Variable([1.0, 2.0], name="w"))
    runs = []

    def run() -> Any:
        runs.append(1)
        return (w * w * 3).sum()

    value, [(gradient, variable)] = gpuopt.value_and_gradients(language.mark(run), grad_loss=2.0)
    assert float(value) == 15.0
    assert variable is w
    assert language.get(gradient).tolist() == [12.0, 24.0]
    assert len(runs) == 1
    with pytest.raises(RuntimeError, match="should be a function"):
        gpuopt.value_and_gradients(value)


def test_by_default_the_trainable_variables_that_were_read_in_order_of_creation(
    language: Language,
) -> None:
    a, b, fixed, _unread = (
        language.place(Variable(np.ones(2, np.float32), name=name, trainable=name != "fixed"))
        for name in ("a", "b", "fixed", "unread")
    )
    count = Variable(3, name="count")  # not floating point
    loss = language.mark(lambda: (b * a * fixed).sum() * int(count))
    pairs = sgd().compute_gradients(loss)
    assert [variable.name for _, variable in pairs] == ["a", "b"]
    [gradient] = gradients_of(loss, fixed)
    assert language.get(gradient).tolist() == [3, 3]


def test_variables_come_in_nested_lists(language: Language) -> None:
    a, b, c = (language.place(Variable(np.ones(1, np.float32), name=n)) for n in "abc")
    loss = language.mark(lambda: (a * 2 + c * 3).sum())
    pairs = sgd().compute_gradients(loss, [c, (b, [a])])
    assert [(v.name, None if g is None else float(language.get(g)[0])) for g, v in pairs] == [
        ("c", 3.0),
        ("b", None),
        ("a", 2.0),
    ]


def test_a_vector_loss_acts_as_its_sum_and_grad_loss_weighs_it(language: Language) -> None:
    a = language.place(Variable(np.float32([1, 2, 3])))
    loss = language.mark(lambda: a * a)
    [gradient] = gradients_of(loss)
    assert language.get(gradient).tolist() == [2, 4, 6]
    [gradient] = gradients_of(loss, grad_loss=language.put(np.float32([1, 0, 10])))
    assert language.get(gradient).tolist() == [2, 0, 60]
    [gradient] = gradients_of(loss, grad_loss=0.5)
    assert language.get(gradient).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"grad_loss has shape \(2,\); the loss has shape \(3,\)"):
        gradients_of(loss, grad_loss=language.put(np.float32([1, 2])))


def test_the_variable_itself_may_be_the_loss(language: Language) -> None:
    a = language.place(Variable(np.float32([1, 2])))
    [gradient] = gradients_of(language.mark(lambda: a))
    assert language.get(gradient).tolist() == [1, 1]


def test_two_threads_differentiate_and_apply_at_once(language: Language) -> None:
    def train(model: Model, optimizer: gpuopt.Optimizer, steps: int) -> list[bytes]:
        for _ in range(steps):
            optimizer.minimize(model.loss)
        return [variable.numpy().tobytes() for variable in model.variables.values()]

    alone = train(Model(language), gpuopt.AdamOptimizer(0.1), 12)
    models = [Model(language) for _ in range(4)]
    shared = gpuopt.GradientDescentOptimizer(0.1)
    results: list[Any] = [None] * len(models)

    def work(number: int) -> None:
        results[number] = train(models[number], gpuopt.AdamOptimizer(0.1), 12)
        train(models[number], shared, 5)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [alone] * len(models)


def test_an_error_in_the_loss_leaves_nothing_behind(language: Language) -> None:
    a = language.place(Variable(np.ones(3, np.float32), name="a"))

    def fails() -> Any:
        (a * 2).sum()
        raise KeyError("in the loss")

    for gate in (Gate.GATE_NONE, Gate.GATE_OP, Gate.GATE_GRAPH):
        with pytest.raises(KeyError, match="in the loss"):
            sgd().minimize(language.mark(fails), gate_gradients=gate)
    assert recorder() is None
    assert type(a.value()) is type(a.storage)
    [gradient] = gradients_of(language.mark(lambda: (a * a).sum()))
    assert language.get(gradient).tolist() == [2, 2, 2]


def test_losses_of_replicas_that_average_are_scaled(language: Language) -> None:
    table = language.place(Variable(np.ones((3, 1), np.float32)))
    w = language.place(Variable(np.ones(1, np.float32)))
    ids = language.put(np.array([1]))
    loss = language.mark(lambda: gpuopt.embedding_lookup(table, ids).sum() + (w * 4).sum())
    for reduction, of_row, of_w in (("mean", 0.25, 1.0), ("sum", 1.0, 4.0)):
        with in_replica(ReplicaContext(1, 4, loss_reduction=reduction)):  # type: ignore[arg-type]
            rows, gradient = gradients_of(loss, table, w)
            assert language.get(rows.values).tolist() == [[of_row]]
            assert language.get(gradient).tolist() == [of_w]
            [gradient] = gradients_of(loss, w, grad_loss=2.0)
            assert language.get(gradient).tolist() == [2 * of_w]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_have_their_variables_dtype(language: Language, dtype: str) -> None:
    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    w = language.place(Variable([1.0, 2.0], dtype=numpy_dtype))
    table = language.place(Variable([[1.0], [3.0]], dtype=numpy_dtype))
    ids = language.put(np.array([1, 1]))

    def loss() -> Any:
        return (w * w).sum() + (gpuopt.embedding_lookup(table, ids) ** 2).sum()

    gradient, rows = gradients_of(language.mark(loss), w, table)
    assert gradient.dtype == rows.dtype == numpy_dtype
    assert language.get(gradient).astype(float).tolist() == [2, 4]
    assert language.get(rows.values).astype(float).tolist() == [[6], [6]]


def test_arrays_in_var_list_are_refused(language: Language) -> None:
    array = np.ones(2, np.float32)
    with pytest.raises(TypeError, match=r"var_list holds ndarray, not a Variable"):
        gradients_of(language.mark(lambda: array.sum()), array)  # type: ignore[arg-type]


def test_no_gradient_at_all_is_an_error_that_names_loss_and_variables(language: Language) -> None:
    a = language.place(Variable(np.ones(2, np.float32), name="a"))

    def disconnected() -> float:
        return 1.0

    for gate in (Gate.GATE_NONE, Gate.GATE_OP, Gate.GATE_GRAPH):
        with pytest.raises(ValueError, match=r"No gradients provided .*disconnected.*\['a'\]"):
            sgd().minimize(language.mark(disconnected), var_list=[a], gate_gradients=gate)
