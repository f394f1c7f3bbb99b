"""Caution: steps against the gradient alone, by a mean over the whole variable."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from array_slots import array_slots
from dtypes import every_dtype
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable

# Epsilons beside which the smallest `v` of 16 bits may be zero.
NUMBERS = {"learning_rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.25}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "torch_adam_w": {"weight_decay": 0.25},
    "ams_grad": {},
    "torch_nadam": {},
    "r_adam": {},
    "ada_belief": {"epsilon_root": 0.01},
}
CLASSES = {
    "torch_adam_w": gpuopt.TorchAdamWOptimizer,
    "ams_grad": gpuopt.AMSGradOptimizer,
    "torch_nadam": gpuopt.TorchNAdamOptimizer,
    "r_adam": gpuopt.RAdamOptimizer,
    "ada_belief": gpuopt.AdaBeliefOptimizer,
}


def trained(
    name: str, start: np.ndarray, gradients: list[np.ndarray], **numbers: Any
) -> dict[str, Any]:
    history = [(t + 1, g.astype(np.float64)) for t, g in enumerate(gradients)]
    numbers = {**NUMBERS, **OPTIMIZERS[name], **numbers}
    decay = numbers.pop("weight_decay", 0.0)
    base = (
        partial(textbook.torch_adam_w, weight_decay=0.0)
        if name == "torch_adam_w"
        else getattr(textbook, name)
    )
    wide = start.astype(np.float64)
    return textbook.cautious(base, wide, history, weight_decay=decay, **numbers)


def check(optimizer: Any, variables: list[Variable], expected: list[dict[str, Any]]) -> None:
    for variable, state in zip(variables, expected, strict=True):
        # Each of four steps rounds the weight and its slots, once each.
        tolerance = 16 * float(ml_dtypes.finfo(variable.dtype).eps)
        slots = {name: optimizer.get_slot(variable, name) for name in array_slots(optimizer)}
        for name, got in {"var": variable, **slots}.items():
            np.testing.assert_allclose(
                got.numpy().astype(np.float64), state[name], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
@every_dtype
@pytest.mark.one_in(2)
def test_steps_are_the_textbooks(dtype: Any, name: str, xp: Any) -> None:
    rng = np.random.default_rng(1)
    starts = [rng.normal(size=shape).astype(dtype) for shape in ((), (0,), (7, 3), (3001,))]
    # Of a few sizes and both signs: none is so small that rounding decides which way a step goes.
    steps = [
        [np.asarray(rng.choice([-2, -0.5, 0, 1, 4], s.shape)).astype(dtype) for s in starts]
        for _ in range(4)
    ]
    variables = [variable_on(xp, start) for start in starts]
    optimizer = CLASSES[name](**NUMBERS, **OPTIMIZERS[name], cautious=True)
    for gradients in steps:
        pairs = zip(map(xp.asarray, gradients), variables, strict=True)
        optimizer.apply_gradients(list(pairs))
    expected = [
        trained(name, s, [each[i] for each in steps]) for i, s in enumerate(starts) if s.size
    ]
    check(optimizer, [v for v in variables if v.shape != (0,)], expected)


def test_an_element_that_would_go_along_with_its_gradient_stays(xp: Any) -> None:
    w = variable_on(xp, np.zeros(4))
    optimizer = gpuopt.TorchAdamWOptimizer(0.1, beta1=0.9, weight_decay=0.0, cautious=True)
    optimizer.apply_gradients([(xp.asarray(np.ones(4)), w)])
    before = w.numpy()
    optimizer.apply_gradients([(xp.asarray(np.array([1.0, 1.0, 1.0, -0.5])), w)])
    moved = w.numpy() - before
    assert moved[3] == 0
    np.testing.assert_allclose(moved[:3], -0.1 / 0.75, rtol=1e-6)


def test_a_step_is_lengthened_a_thousand_times_at_most(xp: Any) -> None:
    w = variable_on(xp, np.zeros(4000))
    gradient = np.zeros(4000)
    gradient[17] = 1
    optimizer = gpuopt.TorchAdamWOptimizer(0.1, weight_decay=0.0, cautious=True)
    optimizer.apply_gradients([(xp.asarray(gradient), w)])
    assert np.flatnonzero(w.numpy()).tolist() == [17]
    np.testing.assert_allclose(w.numpy()[17], -100, rtol=1e-6)


def test_groups_and_lists_of_decaying_variables_keep_their_own(xp: Any) -> None:
    rng = np.random.default_rng(2)
    starts = [rng.normal(size=n).astype(np.float32) for n in (40, 50, 60)]
    variables = [variable_on(xp, s, name=f"w{i}") for i, s in enumerate(starts)]
    group = ParameterGroup(variables=[variables[1]], learning_rate=0.5, weight_decay=0.125)
    optimizer = gpuopt.TorchAdamWOptimizer(
        **NUMBERS, weight_decay=0.25, cautious=True, groups=[group]
    )
    steps = [[rng.choice([-2, 1, 3], s.size).astype(np.float32) for s in starts] for _ in range(3)]
    for gradients in steps:
        pairs = list(zip(map(xp.asarray, gradients), variables, strict=True))
        optimizer.apply_gradients(pairs, decay_var_list=variables[:2])
    own: list[dict[str, Any]] = [
        {},
        {"learning_rate": 0.5, "weight_decay": 0.125},
        {"weight_decay": 0.0},
    ]
    expected = [
        trained("torch_adam_w", s, [step[i] for step in steps], **own[i])
        for i, s in enumerate(starts)
    ]
    check(optimizer, variables, expected)


def test_a_sparse_gradient_makes_the_step_of_a_dense_one(xp: Any) -> None:
    start = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)
    tables = [variable_on(xp, start) for _ in range(2)]
    rows = np.array([3, 1, 3, 39, 0])
    values = (np.arange(15).reshape(5, 3) / 4 - 1).astype(np.float32)
    dense = np.zeros((40, 3), np.float32)
    np.add.at(dense, rows, values)
    given = [IndexedSlices(xp.asarray(values), xp.asarray(rows)), xp.asarray(dense)]
    for gradient, table in zip(given, tables, strict=True):
        optimizer = gpuopt.RAdamOptimizer(0.125, cautious=True)
        for _ in range(2):
            optimizer.apply_gradients([(gradient, table)])
    assert np.array_equal(tables[0].numpy(), tables[1].numpy())
    assert np.array_equal(tables[0].numpy()[2], start[2])
    assert not np.array_equal(tables[0].numpy(), start)


def rows_that_decay(xp: Any, dtype: Any, height: int = 12, **options: Any) -> None:
    """Compares a table with one whose rows decay before the step, as the gradient names them."""
    rng = np.random.default_rng(height)
    start = rng.choice([-2, 1, 4], (height, 5)).astype(dtype)
    decaying, other = variable_on(xp, start), variable_on(xp, start)
    numbers = {"epsilon": 0.25, "cautious": True, **options}
    optimizers = [gpuopt.TorchAdamWOptimizer(0.5, weight_decay=w, **numbers) for w in (0.25, 0.0)]
    for _ in range(2):
        rows = rng.integers(0, height - 1, height // 3)
        # Halves, so that a decay by an eighth is exact. Some of the named rows' sums are 0 or -0.
        values = rng.choice([-1, -0.0, 0.0, 0.5], (len(rows), 5)).astype(dtype)
        named = np.isin(np.arange(height), rows)[:, np.newaxis]
        wide = other.numpy().astype(np.float64)
        other.assign(np.where(named, 0.875 * wide, wide).astype(dtype))
        for optimizer, table in zip(optimizers, (decaying, other), strict=True):
            given = IndexedSlices(xp.asarray(values), xp.asarray(rows))
            optimizer.apply_gradients([(given, table)])
    tolerance = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        decaying.numpy().astype(np.float64),
        other.numpy().astype(np.float64),
        rtol=tolerance,
        atol=tolerance,
    )
    assert np.array_equal(decaying.numpy()[-1], start[-1])  # no gradient named it


@every_dtype
def test_only_rows_that_a_sparse_gradient_names_decay(dtype: Any, xp: Any) -> None:
    rows_that_decay(xp, dtype)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.5}, {"clip_value": 0.25}])
def test_clipped_gradients_let_the_same_rows_decay(clip: dict[str, Any], xp: Any) -> None:
    rows_that_decay(xp, np.float32, **clip)


def test_rows_decay_in_each_form(every_cpu_form: str) -> None:
    for dtype in (np.float32, np.float64):
        rows_that_decay(np, dtype, height=100_000)


@pytest.mark.parametrize(
    "every_cpu_form",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)],
    indirect=True,
)
@every_dtype
@pytest.mark.one_in(4)
def test_large_and_small_variables_step_in_each_form(dtype: Any, every_cpu_form: str) -> None:
    rng = np.random.default_rng(4)
    starts = [rng.normal(size=n).astype(dtype) for n in (300_000, 3, 40_000)]
    steps = [[rng.choice([-2, 1], s.size).astype(dtype) for s in starts] for _ in range(2)]
    variables = [Variable(start) for start in starts]
    optimizer = gpuopt.TorchAdamWOptimizer(**NUMBERS, weight_decay=0.25, cautious=True)
    for gradients in steps:
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    expected = [
        trained("torch_adam_w", s, [each[i] for each in steps]) for i, s in enumerate(starts)
    ]
    check(optimizer, variables, expected)


@pytest.mark.contract
def test_a_state_tells_whether_steps_were_cautious() -> None:
    states = []
    for cautious in (False, True):
        optimizer = gpuopt.AMSGradOptimizer(cautious=cautious)
        optimizer.apply_gradients([(np.ones(2), Variable(np.ones(2), name="w"))])
        states.append(optimizer.state_dict()["hyperparameters"]["rule"])
    assert states == ["ams_grad", "cautious_ams_grad"]


def test_a_gradient_that_is_no_number_is_not_hidden(xp: Any) -> None:
    w = variable_on(xp, np.ones(3))
    optimizer = gpuopt.TorchAdamWOptimizer(0.1, cautious=True)
    optimizer.apply_gradients([(xp.asarray(np.array([1.0, np.nan, 1.0])), w)])
    assert np.isnan(w.numpy()).tolist() == [False, True, False]


@gpuopt.update_rule(row_slots=["v"])
def of_rows(var: Any, grad: Any, m: Any, v: Any, *, learning_rate: Any, mean_square: Any) -> None:
    v += mean_square
    m += grad
    var -= learning_rate / np.sqrt(v) * m


@gpuopt.update_rule(sums=["total"], terms=lambda var, grad, *_, **__: [grad])
def of_sums(var: Any, grad: Any, m: Any, v: Any, *, learning_rate: Any, total: Any) -> None:
    var -= learning_rate * total * grad


@pytest.mark.contract
@pytest.mark.parametrize(
    ("users_rule", "words"),
    [
        (of_rows, r"cautious=True .* of_rows of .*row_slots=\('v',\)"),
        (of_sums, r"cautious=True .* of_sums of .*sums=\('total',\)"),
    ],
)
def test_caution_is_refused_where_a_rule_has_numbers_of_rows_or_sums(
    users_rule: Any, words: str
) -> None:
    class OwnOptimizer(gpuopt.AMSGradOptimizer):
        rule = users_rule

    with pytest.raises(ValueError, match=words):
        OwnOptimizer(0.5, cautious=True)
