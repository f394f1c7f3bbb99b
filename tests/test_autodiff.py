"""Differentiation of losses: what every engine promises, and what one of them adds."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autograd
import autograd.numpy as anp
import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from autograd.extend import defvjp, primitive
from every_optimizer import CONFIGURATIONS, make
from golden_cases import read_json

import gpuopt
from gpuopt import Device, IndexedSlices, Variable
from gpuopt.autodiff import cupy_compat
from gpuopt.recording import recorder
from gpuopt.replica_context import ReplicaContext, in_replica

Gate = gpuopt.Optimizer
IDS = np.array([[1, 3], [3, 0]])
FEATURES = np.random.default_rng(0).normal(size=(2, 5))


def sgd(learning_rate: float = 0.1) -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(learning_rate)


def gradients_of(loss: Any, *var_list: Variable, **options: Any) -> list[Any]:
    pairs = sgd().compute_gradients(loss, list(var_list) or None, **options)
    assert not var_list or [variable for _, variable in pairs] == list(var_list)
    return [gradient for gradient, _ in pairs]


# What the engines share


@dataclass
class Language:
    """How a loss is written for one engine; `xp` spells as numpy does.

    Attributes:
        put: Makes an array that the loss computes with.
        mark: Marks a loss for the engine.
        place: Moves a new variable to where the engine finds it.
        get: Brings a gradient back as a numpy array.
    """

    xp: Any
    put: Callable[[Any], Any]
    mark: Callable[[Any], Any] = lambda loss: loss
    place: Callable[[Variable], Variable] = lambda variable: variable
    get: Callable[[Any], np.ndarray] = np.asarray


def to_stand_in(variable: Variable) -> Variable:
    """Moves a variable to the emulated GPU, under its name."""
    variable._array = fake_cupy.asarray(variable._array)
    variable.device = Device("gpu")
    return variable


@pytest.fixture(
    params=[
        "numpy",
        "autograd.numpy",
        pytest.param("stand-in", marks=pytest.mark.emulator),
        pytest.param("torch", marks=pytest.mark.torch),
    ]
)
def language(request: pytest.FixtureRequest) -> Language:
    cupy_compat.install()
    if request.param == "torch":
        import torch

        return Language(torch, torch.as_tensor, gpuopt.with_torch)
    if request.param == "stand-in":
        request.getfixturevalue("emulated_gpus")
        cupy_compat.register_device_arrays(fake_cupy.ndarray, fake_cupy)
        return Language(np, fake_cupy.asarray, place=to_stand_in, get=fake_cupy.asnumpy)
    return Language(np if request.param == "numpy" else anp, np.asarray)


class Model:
    """An embedding and two layers; `unused` takes no part in the loss."""

    def __init__(self, language: Language) -> None:
        rng = np.random.default_rng(1)
        shapes = {"table": (6, 3), "w": (11, 4), "b": (4,), "u": (4, 2), "unused": (3,)}
        self.values = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        self.variables = {
            name: language.place(Variable(value, name=name, dtype=np.float32))
            for name, value in self.values.items()
        }
        features, ids = language.put(FEATURES.astype(np.float32)), language.put(IDS)
        v, xp = self.variables, language.xp

        def loss() -> Any:
            rows = gpuopt.embedding_lookup(v["table"], ids).reshape((2, 6))
            hidden = xp.tanh(xp.concatenate([rows, features], 1) @ v["w"] + v["b"])
            return xp.mean((hidden @ v["u"] - 0.3) ** 2)

        self.loss = language.mark(loss)

    def expected(self, name: str) -> np.ndarray:
        """Central differences of the loss, written once more in plain numpy and float64."""

        def loss(values: dict[str, np.ndarray]) -> float:
            rows = values["table"][IDS].reshape(2, 6)
            hidden = np.tanh(np.concatenate([rows, FEATURES], 1) @ values["w"] + values["b"])
            return float(np.mean((hidden @ values["u"] - 0.3) ** 2))

        gradient, step = np.zeros_like(self.values[name]), 1e-6
        for index in np.ndindex(gradient.shape):
            ahead, behind = ({**self.values, name: self.values[name].copy()} for _ in range(2))
            ahead[name][index] += step
            behind[name][index] -= step
            gradient[index] = (loss(ahead) - loss(behind)) / (2 * step)
        return gradient


def dense(gradient: Any, get: Callable[[Any], np.ndarray] = np.asarray) -> np.ndarray:
    if not isinstance(gradient, IndexedSlices):
        return get(gradient)
    result = np.zeros(gradient.dense_shape, gradient.dtype)
    np.add.at(result, get(gradient.indices), get(gradient.values))
    return result


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


def test_lookups_of_one_table_join_and_beside_a_dense_read_become_dense(
    language: Language,
) -> None:
    table = language.place(Variable(np.ones((6, 2), np.float32)))
    first, second = language.put(np.array([0, 2, 0])), language.put(np.array([5]))

    def lookup(ids: Any) -> Any:
        return gpuopt.embedding_lookup(table, ids).sum()

    [gradient] = gradients_of(language.mark(lambda: lookup(first) + lookup(second) * 2))
    assert isinstance(gradient, IndexedSlices)
    assert sorted(language.get(gradient.indices).tolist()) == [0, 0, 2, 5]
    assert dense(gradient, language.get)[:, 0].tolist() == [2, 0, 1, 0, 0, 2]

    [gradient] = gradients_of(language.mark(lambda: lookup(first) + (table * 2).sum()))
    assert not isinstance(gradient, IndexedSlices)
    assert language.get(gradient)[:, 0].tolist() == [4, 2, 3, 2, 2, 2]

    doubled = language.mark(lambda: gpuopt.embedding_lookup(table * 2, first).sum())
    [gradient] = gradients_of(doubled)
    assert not isinstance(gradient, IndexedSlices)
    assert language.get(gradient)[:, 0].tolist() == [4, 0, 2, 0, 0, 0]


def test_a_lookup_takes_ids_of_any_shape(language: Language) -> None:
    table = language.place(Variable(np.arange(12, dtype=np.float32).reshape(6, 2)))
    for ids, indices in ((3, [3]), ([4, 1], [4, 1]), (np.zeros((0, 2), np.int32), [])):
        shapes = []

        def loss(ids: Any = ids, shapes: list[Any] = shapes) -> Any:
            rows = gpuopt.embedding_lookup(table, ids)
            shapes.append(tuple(rows.shape))
            return rows.sum()

        [gradient] = gradients_of(language.mark(loss))
        assert shapes == [(*np.shape(ids), 2)]
        assert language.get(gradient.indices).tolist() == indices
        assert gradient.values.shape == (len(indices), 2)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([0, 6], IndexError, r'id 6 for "table" is not in \[0, 6\)'),
        ([-1], IndexError, r'id -1 for "table" is not in \[0, 6\)'),
        (np.float32([1]), TypeError, 'ids for "table" must be integers, got float32'),
    ],
)
def test_a_lookup_refuses_bad_ids(ids: Any, error: type[Exception], message: str) -> None:
    table = Variable(np.ones((6, 2)), name="table")
    with pytest.raises(error, match=message):
        gradients_of(lambda: np.sum(gpuopt.embedding_lookup(table, ids)))
    with pytest.raises(error, match=message):
        gpuopt.embedding_lookup(table, ids)


def test_outside_a_loss_a_lookup_is_an_array() -> None:
    table = Variable(np.arange(6.0).reshape(3, 2))
    assert gpuopt.embedding_lookup(table, [2, 0]).tolist() == [[4, 5], [0, 1]]


def test_gates_lead_to_the_same_bits(language: Language) -> None:
    ends = []
    for gate in (Gate.GATE_NONE, Gate.GATE_OP, Gate.GATE_GRAPH):
        model, step = Model(language), Variable(0, name="global_step", dtype=np.int64)
        optimizer = gpuopt.AdamOptimizer(0.1)
        for _ in range(3):
            optimizer.minimize(model.loss, step, gate_gradients=gate)
        assert int(step) == 3
        states = [*model.variables.values(), *optimizer.variables()]
        ends.append([state.numpy().tobytes() for state in states])
    assert ends[0] == ends[1] == ends[2]


def test_two_threads_differentiate_and_apply_at_once(language: Language) -> None:
    def train(model: Model, optimizer: gpuopt.Optimizer, steps: int) -> list[bytes]:
        for _ in range(steps):
            optimizer.minimize(model.loss)
        return [variable.numpy().tobytes() for variable in model.variables.values()]

    alone = train(Model(language), gpuopt.AdamOptimizer(0.1), 50)
    models = [Model(language) for _ in range(4)]
    shared = gpuopt.GradientDescentOptimizer(0.1)
    results: list[Any] = [None] * len(models)

    def work(number: int) -> None:
        results[number] = train(models[number], gpuopt.AdamOptimizer(0.1), 50)
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


# autograd


def test_gathered_rows_have_tensorflows_gradient() -> None:
    golden = read_json("misc.json")["embedding_gradient_type"]
    table = Variable(np.arange(1, 7, dtype=np.float32).reshape(3, 2))

    def squares() -> Any:
        return np.sum(gpuopt.embedding_lookup(table, golden["indices"]) ** 2)

    [gradient] = gradients_of(squares)
    assert type(gradient).__name__ == golden["gather_only"]
    assert gradient.indices.tolist() == golden["indices"]
    assert gradient.values.tolist() == golden["values"]
    [gradient] = gradients_of(lambda: squares() + np.sum(table[0]))
    assert isinstance(gradient, np.ndarray)
    [gradient] = gradients_of(
        lambda: gpuopt.embedding_lookup(table, golden["indices"]), grad_loss=3.0
    )
    assert gradient.values.tolist() == golden["grad_loss3_values"]


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


@primitive
def fails_backward(x: Any) -> Any:
    return x


def _raise(gradient: Any) -> Any:
    raise ArithmeticError("in mid-backward")


defvjp(fails_backward, lambda ans, x: _raise)


@pytest.mark.parametrize("gate", [Gate.GATE_OP, Gate.GATE_GRAPH, Gate.GATE_NONE])
def test_an_error_in_mid_backward(gate: int) -> None:
    first, last = Variable([1.0], name="first"), Variable([1.0], name="last")
    step = Variable(0, name="global_step")
    optimizer = gpuopt.MomentumOptimizer(0.5, 0.9)
    optimizer.minimize(lambda: np.sum(first * last), step)
    states = [first, last, step, *optimizer.variables()]
    before = [state.numpy().tobytes() for state in states]

    def loss() -> Any:
        return np.sum(last * fails_backward(first * 2))

    with pytest.raises(ArithmeticError, match="in mid-backward"):
        optimizer.minimize(loss, step, gate_gradients=gate)
    after = [state.numpy().tobytes() for state in states]
    if gate == Gate.GATE_NONE:  # `last` had its turn
        changed = {s.name for s, x, y in zip(states, before, after, strict=True) if x != y}
        assert changed == {"last", "last/Momentum"}
    else:
        assert after == before
    assert recorder() is None
    optimizer.minimize(lambda: np.sum(first * last), step, gate_gradients=gate)
    assert int(step) == 2


def test_gate_none_holds_one_gradient_at_a_time() -> None:
    num_layers, size = 40, 128
    layers = [Variable(np.eye(size, dtype=np.float32)) for _ in range(num_layers)]
    x = np.ones((1, size), np.float32)
    optimizer = sgd(1e-3)

    def loss() -> Any:
        hidden = x
        for layer in layers:
            hidden = np.tanh(hidden @ layer)
        return np.sum(hidden)

    def peak(gate: int) -> int:
        optimizer.minimize(loss, gate_gradients=gate)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        optimizer.minimize(loss, gate_gradients=gate)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest - before

    of_a_gradient = layers[0].storage.nbytes
    assert peak(Gate.GATE_OP) > num_layers * of_a_gradient
    assert peak(Gate.GATE_NONE) < 5 * of_a_gradient


def test_gate_none_gives_way_with_one_warning_to_an_overridden_hook() -> None:
    class Clipped(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> None:
            pairs = list(grads_and_vars)
            sizes.append(len(pairs))
            super().apply_gradients(pairs, *args, **options)

    sizes: list[int] = []
    a, b = Variable([1.0]), Variable([1.0])
    optimizer = Clipped(0.1)

    def minimize() -> None:
        optimizer.minimize(lambda: np.sum(a * b), gate_gradients=Gate.GATE_NONE)

    with pytest.warns(UserWarning, match="Clipped overrides apply_gradients"):
        minimize()
    minimize()  # without a warning, which would be an error
    assert sizes == [2, 2]


# torch


@pytest.mark.torch
def test_torch_works_on_the_variables_own_memory() -> None:
    import torch

    w = Variable(np.ones(4, np.float32))
    pointers = []

    @gpuopt.with_torch
    def loss() -> Any:
        tensor = w.value()
        pointers.append(tensor.data_ptr())
        return torch.sum(tensor**2)

    optimizer = sgd(0.25)
    optimizer.minimize(loss)
    optimizer.minimize(loss)
    assert pointers == [w.storage.ctypes.data] * 2
    assert w.numpy().tolist() == [0.25] * 4


@pytest.mark.torch
def test_torchs_sparse_embedding_gives_slices() -> None:
    import torch

    table = Variable(np.ones((5, 2), np.float32))
    ids = torch.tensor([[4, 1], [4, 4]])

    @gpuopt.with_torch
    def loss() -> Any:
        return torch.nn.functional.embedding(ids, table.value(), sparse=True).sum()

    [gradient] = gradients_of(loss)
    assert isinstance(gradient, IndexedSlices)
    assert gradient.dense_shape == (5, 2)
    assert dense(gradient)[:, 0].tolist() == [0, 1, 0, 0, 3]
    for gate in (Gate.GATE_OP, Gate.GATE_NONE):
        sgd(1.0).minimize(loss, gate_gradients=gate)
    assert table.numpy()[:, 0].tolist() == [1, -1, 1, 1, -5]


def test_with_torch_says_that_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        gpuopt.with_torch(lambda: 1.0)
