"""What holds for every optimizer of the package, found by iterating over the exports."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from array_slots import array_slots
from dtypes import DTYPES
from every_optimizer import (
    ARGUMENTS,
    CONFIGURATIONS,
    FIRST_OF_EACH_SHAPE,
    configurations,
    in_each_shapes_forms,
    in_each_shapes_forms_and_dtypes,
    in_every_form,
    make,
    modules,
    one_of_each_shape,
    one_of_each_shape_in_forms,
    optimizer_classes,
    own_step,
    update_rules,
)
from row_sums import sums_of_rows

import gpuopt
from gpuopt import IndexedSlices, Variable
from gpuopt.optimizers.base import AllDigitsOptimizer
from gpuopt.rules.staged import StagedRule


def eps(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps)


def state(optimizer: gpuopt.Optimizer, variable: Any) -> list[np.ndarray]:
    slots = [optimizer.get_slot(variable, name) for name in array_slots(optimizer)]
    return [np.array(variable), *(slot.numpy() for slot in slots)]


@pytest.mark.contract
def test_every_optimizer_is_complete() -> None:
    """One module, one textbook function, one export: names the missing piece."""
    for module in modules():
        name = module.__name__.rpartition(".")[2]
        own = [
            value
            for value in vars(module).values()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        assert len(own) == 1, f"{module.__name__} holds {own}, not one optimizer"
        assert own[0].__name__ in gpuopt.__all__, f"{own[0].__name__} is not exported"
        assert own[0].__doc__, f"{own[0].__name__} has no docstring"
        assert hasattr(textbook, name), f"tests/support/textbook.py has no {name}"
    for rule in update_rules():
        if isinstance(rule, StagedRule):
            assert rule.rule in update_rules()
    assert set(ARGUMENTS) <= set(optimizer_classes())


def test_no_optimizer_is_left_out_of_a_dtype_or_a_form() -> None:
    cases = [case.values for case in in_each_shapes_forms_and_dtypes.args[1]]
    for _, name, arguments in CONFIGURATIONS:
        own = [values[2:] for values in cases if values[:2] == (name, arguments)]
        assert {dtype for _, dtype in own} == set(DTYPES)
        assert {form for form, _ in own} == {"plain", "replayed", "compiled"}
    for _, name, arguments in FIRST_OF_EACH_SHAPE:
        assert len([values for values in cases if values[:2] == (name, arguments)]) == 12


@in_every_form
def test_dense_step_is_the_textbooks(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    rng = np.random.default_rng(1)
    w = Variable(rng.normal(size=(5, 3)))
    gradients = [rng.normal(size=(5, 3)) for _ in range(6)]
    gradients[2][...] = 0
    start = w.numpy()
    optimizer = make(name, {k: as_float64(v) for k, v in arguments.items()})
    step = own_step(optimizer)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, w)], global_step=step)
    history = [(t + 1, g) for t, g in enumerate(gradients)]
    expected = hand_computed(name, start, history, arguments)
    # Adam's powers of beta are float32; others keep all digits.
    tolerance = 1e-12 if keeps_all_digits(name) else 2e-6
    np.testing.assert_allclose(w.numpy(), expected["var"], rtol=tolerance, atol=tolerance)
    for slot in array_slots(optimizer):
        got = optimizer.get_slot(w, slot).numpy()
        np.testing.assert_allclose(got, expected[slot], rtol=1e-12, atol=1e-12)


def keeps_all_digits(name: str) -> bool:
    return issubclass(optimizer_classes()[name], AllDigitsOptimizer)


def as_float64(value: Any) -> Any:
    return np.float64(value) if isinstance(value, float) else value


def hand_computed(
    name: str, start: np.ndarray, history: Any, arguments: dict[str, Any]
) -> dict[str, np.ndarray]:
    module = optimizer_classes()[name].__module__.rpartition(".")[2]
    function = getattr(textbook, module)
    parameters = inspect.signature(optimizer_classes()[name].__init__).parameters
    keeps_all = keeps_all_digits(name)
    given = {"learning_rate": 0.1 if keeps_all else float(np.float32(0.1)), **arguments}
    for parameter in inspect.signature(function).parameters.values():
        default = parameters[parameter.name].default if parameter.name in parameters else None
        if parameter.name not in given and isinstance(default, float):
            keeps_its = keeps_all or parameter.name.startswith("initial_")
            given[parameter.name] = default if keeps_its else float(np.float32(default))
    return function(start, history, **given)


# As in TensorFlow, whose sparse form rounds numbers to float32 that its dense form does not round.
SPARSE_IN_FLOAT32 = {"PowerSignOptimizer"}


@in_each_shapes_forms_and_dtypes
@pytest.mark.one_in(8)
def test_sparse_step_updates_the_rows_like_a_dense_step_on_them_alone(
    name: str, arguments: dict[str, Any], dtype: Any, every_cpu_form: str
) -> None:
    rng = np.random.default_rng(2)
    start = rng.normal(size=(6, 3)).astype(dtype)
    rows = np.array([4, 1, 4, 5])
    values = rng.normal(size=(4, 3)).astype(dtype)
    table, optimizer = Variable(start), make(name, arguments)
    optimizer.apply_gradients([(IndexedSlices(values, rows), table)])

    # In float32, so that the sum of the repeated row is not rounded on the way.
    real = np.float64 if dtype == np.float64 else np.float32
    touched = Variable(start[[1, 4, 5]].astype(real))
    sums = np.stack([values[1].astype(real), values[0].astype(real) + values[2], values[3]])
    reference = make(name, arguments)
    reference.apply_gradients([(sums.astype(real), touched)])
    digits = max(eps(dtype), eps(np.float32) if name in SPARSE_IN_FLOAT32 else 0)
    for got, expected in zip(state(optimizer, table), state(reference, touched), strict=True):
        np.testing.assert_allclose(
            got[[1, 4, 5]].astype(real), expected, rtol=2 * digits, atol=digits
        )
    untouched = table.numpy()[[0, 2, 3]]
    assert np.array_equal(untouched, start[[0, 2, 3]])  # no momentum yet, also in Adam


# What changes in rows that a sparse gradient does not name, as in TensorFlow.
MOVING: dict[str, set[str]] = {
    "AdamOptimizer": {"var", "m", "v"},
    "AdamWOptimizer": {"var", "m", "v"},
    "NadamOptimizer": {"m", "v"},
    "AddSignOptimizer": {"m"},
    "PowerSignOptimizer": {"m"},
}


@in_each_shapes_forms
def test_rows_without_a_gradient_move_where_they_do_in_tensorflow(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    table, optimizer = Variable(np.ones((4, 2), np.float32)), make(name, arguments)
    everywhere = IndexedSlices(np.ones((4, 2), np.float32), np.arange(4))
    optimizer.apply_gradients([(everywhere, table)])
    before = state(optimizer, table)
    optimizer.apply_gradients([(IndexedSlices(np.full((1, 2), 2, np.float32), [2]), table)])
    after = state(optimizer, table)
    moved = set()
    for key, old, new in zip(["var", *array_slots(optimizer)], before, after, strict=True):
        assert not np.array_equal(old[2], new[2])
        if not np.array_equal(old[[0, 1, 3]], new[[0, 1, 3]]):
            moved.add(key)
    assert moved == MOVING.get(name, set())


@in_each_shapes_forms
def test_repeated_rows_update_like_their_sum_to_the_bit(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 5, 40)
    values = rng.normal(size=(40, 2)).astype(np.float32)
    by_row = sums_of_rows(values, rows)
    sums = np.stack([by_row[row] for row in range(5)])
    tables = [Variable(np.ones((5, 2), np.float32)) for _ in range(2)]
    for table, slices in zip(
        tables, [IndexedSlices(values, rows), IndexedSlices(sums, np.arange(5))], strict=True
    ):
        optimizer = make(name, arguments)
        for _ in range(3):
            optimizer.apply_gradients([(slices, table)])
    assert np.array_equal(tables[0].numpy(), tables[1].numpy())


@one_of_each_shape_in_forms
@pytest.mark.parametrize("indices_dtype", [np.int32, np.int64])
def test_empty_sparse_gradient_changes_nothing_before_there_is_momentum(
    name: str, arguments: dict[str, Any], indices_dtype: Any, every_cpu_form: str
) -> None:
    table, optimizer = Variable(np.ones((4, 2), np.float32)), make(name, arguments)
    nothing = IndexedSlices(np.zeros((0, 2), np.float32), np.zeros(0, indices_dtype))
    step = Variable(0, name="step")
    optimizer.apply_gradients([(nothing, table)], global_step=step)
    assert np.array_equal(table.numpy(), np.ones((4, 2)))
    assert int(step) == 1


@in_each_shapes_forms_and_dtypes
@pytest.mark.one_in(8)
def test_every_dtype_steps_like_float64_to_its_own_precision(
    name: str, arguments: dict[str, Any], dtype: Any, every_cpu_form: str
) -> None:
    rng = np.random.default_rng(4)
    start = rng.normal(size=7).astype(dtype)
    gradients = [rng.normal(size=7).astype(dtype) for _ in range(3)]
    narrow, wide = Variable(start), Variable(start.astype(np.float64))
    optimizers = make(name, arguments), make(name, arguments)
    for gradient in gradients:
        optimizers[0].apply_gradients([(gradient, narrow)])
        optimizers[1].apply_gradients([(gradient.astype(np.float64), wide)])
    assert narrow.dtype == dtype
    # Each of three steps rounds the weight and its slots, of sizes up to about 4, once.
    np.testing.assert_allclose(
        narrow.numpy().astype(np.float64), wide.numpy(), rtol=12 * eps(dtype), atol=12 * eps(dtype)
    )


@one_of_each_shape_in_forms
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (100_003,)], ids=str)
@pytest.mark.one_in(8)
def test_any_shape_steps_like_its_elements(
    name: str, arguments: dict[str, Any], shape: tuple[int, ...], every_cpu_form: str
) -> None:
    rng = np.random.default_rng(5)
    start = rng.normal(size=shape).astype(np.float32)
    gradient = rng.normal(size=shape).astype(np.float32)
    w, optimizer = Variable(start), make(name, arguments)
    flat, reference = Variable(np.ravel(start)[-3:]), make(name, arguments)
    for _ in range(2):
        optimizer.apply_gradients([(gradient, w)])
        reference.apply_gradients([(np.ravel(gradient)[-3:], flat)])
    assert w.shape == shape
    np.testing.assert_allclose(np.ravel(w.numpy())[-3:], flat.numpy(), rtol=4 * eps(np.float32))


@one_of_each_shape_in_forms
def test_gradients_are_only_read_and_may_alias(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    w = Variable(np.float32([1, 2, 3]))
    b = Variable(np.float32([1, 2, 3]))
    shared = np.float32([0.5, -0.5, 0.25])
    shared.flags.writeable = False
    constant = np.broadcast_to(np.float32(0.5), 3)
    optimizer = make(name, arguments)
    optimizer.apply_gradients([(shared, w), (shared, b)])
    optimizer.apply_gradients([(constant, w), (constant, b)])
    assert np.array_equal(w.numpy(), b.numpy())
    assert shared.tolist() == [0.5, -0.5, 0.25]


@one_of_each_shape_in_forms
def test_gradient_that_shares_memory_with_its_variable_is_read_first(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    rng = np.random.default_rng(6)
    start = rng.normal(size=50_000).astype(np.float32)
    for view in (lambda a: a, lambda a: a[::-1]):
        array = start.copy()
        reference, optimizer = Variable(start), make(name, arguments)
        make(name, arguments).apply_gradients([(view(array), array)])
        optimizer.apply_gradients([(view(start), reference)])
        assert np.array_equal(array, reference.numpy())


@one_of_each_shape_in_forms
def test_nan_and_infinity_pass_through_without_a_warning(
    name: str, arguments: dict[str, Any], every_cpu_form: str
) -> None:
    w = Variable(np.float32([1, 2, 3, 4]))
    make(name, arguments).apply_gradients([(np.float32([np.nan, np.inf, 0.5, -np.inf]), w)])
    assert np.isnan(w.numpy()[0])
    assert np.isfinite(w.numpy()[2])


@pytest.mark.internal
@one_of_each_shape
def test_slots_live_on_their_variables_device_and_are_not_trainable(
    name: str, arguments: dict[str, Any]
) -> None:
    w, optimizer = Variable(np.ones(3, np.float64)), make(name, arguments)
    assert optimizer.get_slot_names() == []
    optimizer.apply_gradients([(np.ones(3), w)])
    for slot_name in array_slots(optimizer):
        slot = optimizer.get_slot(w, slot_name)
        assert (slot.device, slot.shape, slot.dtype) == (w.device, w.shape, w.dtype)
        assert not slot.trainable
        assert slot.value().ctypes.data % 64 == 0


@configurations
def test_every_hyperparameter_may_be_a_callable(name: str, arguments: dict[str, Any]) -> None:
    calls: list[str] = []
    constant = make(name, arguments)
    numbers = {
        key: value
        for key, value in {"learning_rate": 0.1, **arguments}.items()
        if isinstance(value, float)
    }
    choices = {key: value for key, value in arguments.items() if not isinstance(value, float)}

    def counted(key: str, value: float) -> Any:
        return lambda: calls.append(key) or value

    callables = {key: counted(key, value) for key, value in numbers.items()}
    varying = make(name, {**callables, **choices})
    w, b = Variable(np.float32([1, 2])), Variable(np.float32([1, 2]))
    for t in range(1, 3):
        constant.apply_gradients([(np.float32([1, -1]), w)])
        varying.apply_gradients([(np.float32([1, -1]), b)])
        assert sorted(calls) == sorted(list(numbers) * t)
    assert np.array_equal(w.numpy(), b.numpy())


@one_of_each_shape
def test_two_optimizers_of_one_kind_share_no_state(name: str, arguments: dict[str, Any]) -> None:
    w, b = Variable(np.float32([1, 2])), Variable(np.float32([1, 2]))
    alone, first, second = (make(name, arguments) for _ in range(3))
    for _ in range(2):
        alone.apply_gradients([([1.0, -1.0], b)])
    first.apply_gradients([([1.0, -1.0], w)])
    w.assign([1.0, 2.0])
    for _ in range(2):
        second.apply_gradients([([1.0, -1.0], w)])
    assert np.array_equal(w.numpy(), b.numpy())


@pytest.mark.contract
@pytest.mark.parametrize("name", MOVING)
def test_a_sparse_step_that_moves_all_rows_of_a_tall_table_hints_at_its_cost_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    slices = IndexedSlices(np.ones((1, 1), np.float32), [5])
    short, tall = (Variable(np.zeros((n, 1), np.float32)) for n in (999_999, 1_000_000))
    optimizer = make(name)
    with caplog.at_level(logging.INFO, "gpuopt"):
        optimizer.apply_gradients([(slices, short)])
        make("LazyAdamOptimizer").apply_gradients([(slices, tall)])
        optimizer.apply_gradients([(np.zeros((1_000_000, 1), np.float32), tall)])
        assert caplog.messages == []
        for _ in range(2):
            optimizer.apply_gradients([(slices, tall)])
    [message] = caplog.messages
    assert f'{name} updates all 1000000 rows of "{tall.name}"' in message
    assert ("LazyAdamOptimizer" in message) == (name in ("AdamOptimizer", "AdamWOptimizer"))


def test_hyperparameters_are_rounded_like_tensorflows() -> None:
    def step(learning_rate: Any) -> float:
        w = Variable(np.zeros(1))
        gpuopt.GradientDescentOptimizer(learning_rate).apply_gradients([(np.ones(1), w)])
        return float(w.value()[0])

    assert step(0.1) == -float(np.float32(0.1))
    assert step(lambda: 0.1) == -float(np.float32(0.1))
    assert step(np.float64(0.1)) == -0.1
    assert step(np.array(0.1)) == -0.1
    assert step(np.float32(0.1)) == -float(np.float32(0.1))
    assert step(Variable(np.float64(0.1))) == -0.1
    assert step(1) == -1


def test_adams_powers_are_float32_products_whatever_the_weights_type() -> None:
    w, optimizer = Variable(np.zeros(2)), gpuopt.AdamOptimizer(beta1=0.9, beta2=0.999)
    power = np.float32(0.9)
    for _ in range(20):
        optimizer.apply_gradients([(np.ones(2), w)])
        power = power * np.float32(0.9)
    by_name = {v.name: v for v in optimizer.variables()}
    assert by_name["beta1_power"].dtype == np.float32
    assert by_name["beta1_power"].numpy() == power


def test_adagrad_da_reads_the_step_before_it_is_counted() -> None:
    step = Variable(0, name="global_step", dtype=np.int64)
    optimizer = gpuopt.AdagradDAOptimizer(1.0, step, l1_regularization_strength=0.5)
    w = Variable(np.float32([1]))
    for t in (1, 2, 3):
        optimizer.apply_gradients([(np.float32([1]), w)], global_step=step)
        expected = -(t - 0.5 * t) / np.sqrt(0.1 + t)
        assert w.numpy()[0] == pytest.approx(expected, rel=1e-6)
