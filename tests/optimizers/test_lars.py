"""LARS: norms over whole variables, in every place and type."""

from __future__ import annotations

from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
import textbook
from dtypes import every_dtype
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, Variable

NUMBERS = {"learning_rate": 2.0, "momentum": 0.5, "weight_decay": 0.25, "eeta": 0.125}


@pytest.mark.parametrize("use_nesterov", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (100_003,)], ids=str)
@every_dtype
@pytest.mark.one_in(3)
def test_steps_are_the_textbooks(
    dtype: Any, shape: tuple[int, ...], use_nesterov: bool, xp: Any
) -> None:
    rng = np.random.default_rng(1)
    start = rng.normal(size=shape).astype(dtype)
    gradients = [np.asarray(rng.normal(size=shape)).astype(dtype) for _ in range(3)]
    gradients[1][...] = 0
    w = variable_on(xp, start)
    optimizer = gpuopt.LARSOptimizer(**NUMBERS, use_nesterov=use_nesterov)
    for gradient in gradients:
        optimizer.apply_gradients([(xp.asarray(gradient), w)])
    history = [(t + 1, g.astype(np.float64)) for t, g in enumerate(gradients)]
    wide = start.astype(np.float64)
    expected = textbook.lars(wide, history, **NUMBERS, use_nesterov=use_nesterov)
    # Each of three steps rounds the gradient, the accumulator and the weight, once each.
    tolerance = 9 * float(ml_dtypes.finfo(dtype).eps)
    slot = optimizer.get_slot(w, "momentum")
    for got, value in ((w, expected["var"]), (slot, expected["momentum"])):
        got = got.numpy().astype(np.float64)
        np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance)


def test_variables_have_rates_of_their_own_and_listed_names_none(xp: Any) -> None:
    rng = np.random.default_rng(2)
    starts = [rng.normal(size=n).astype(np.float32) for n in (3, 4, 5)]
    names = ["kernel", "layer/bias", "scale"]
    variables = [
        variable_on(xp, start, name=name) for start, name in zip(starts, names, strict=True)
    ]
    gradients = [rng.normal(size=start.size).astype(np.float32) for start in starts]
    optimizer = gpuopt.LARSOptimizer(**NUMBERS, skip_list=["bias"])
    pairs = [(xp.asarray(g), v) for g, v in zip(gradients, variables, strict=True)]
    optimizer.apply_gradients(pairs)
    for start, gradient, variable in zip(starts, gradients, variables, strict=True):
        skipped = ["bias"] if "bias" in variable.name else None
        history = [(1, gradient.astype(np.float64))]
        alone = textbook.lars(start.astype(np.float64), history, **NUMBERS, skip_list=skipped)
        np.testing.assert_allclose(variable.numpy(), alone["var"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_the_ratio_is_1_where_a_norm_is_zero(zero: str) -> None:
    w = Variable(np.zeros(2) if zero == "weights" else np.array([3.0, 4.0]))
    gradient = np.zeros(2) if zero == "gradient" else np.array([1.0, 2.0])
    gpuopt.LARSOptimizer(0.5, 0.0, weight_decay=0.25).apply_gradients([(gradient, w)])
    expected = [-0.5, -1.0] if zero == "weights" else [3 - 0.5 * 0.75, 4 - 0.5]
    assert w.numpy().tolist() == expected


def test_a_sparse_gradient_makes_a_step_of_momentum(xp: Any) -> None:
    start = np.arange(8, dtype=np.float32).reshape(4, 2)
    tables = [variable_on(xp, start) for _ in range(2)]
    rows = xp.asarray(np.array([3, 1, 3]))
    slices = IndexedSlices(xp.asarray(np.ones((3, 2), np.float32)), rows)
    lars = gpuopt.LARSOptimizer(0.5, 0.75, weight_decay=10.0)
    reference = gpuopt.MomentumOptimizer(0.5, 0.75)
    for _ in range(2):
        lars.apply_gradients([(slices, tables[0])])
        reference.apply_gradients([(slices, tables[1])])
    assert np.array_equal(tables[0].numpy(), tables[1].numpy())
    assert not np.array_equal(tables[0].numpy(), start)


@pytest.mark.emulator
def test_all_norms_take_two_launches_and_the_host_waits_for_none(emulated_gpus: Any) -> None:
    variables = [Variable(np.ones(n, np.float32), device="gpu:0") for n in (9, 5000, 1)]
    pairs = [(fake_cupy.asarray(np.ones(v.shape, np.float32)), v) for v in variables]
    optimizer = gpuopt.LARSOptimizer(**NUMBERS, skip_list=["bias"])
    optimizer.apply_gradients(pairs)
    waits, launches = fake_cupy.counts.synchronisations, emulated_gpus[0].launches
    optimizer.apply_gradients(pairs)
    assert fake_cupy.counts.synchronisations == waits
    assert emulated_gpus[0].launches == launches + 2


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("options", "launches"), [({"clip_value": 1.0}, 2), ({"clip_norm": 1.0}, 2)]
)
def test_the_sums_follow_a_norm_of_all_gradients(
    options: dict[str, float], launches: int, emulated_gpus: Any
) -> None:
    variables = [Variable(np.ones(n, np.float32), device="gpu:0") for n in (9, 5000, 1)]
    pairs = [(fake_cupy.asarray(np.ones(v.shape, np.float32)), v) for v in variables]
    optimizer = gpuopt.LARSOptimizer(**NUMBERS, **options)
    for _ in range(2):
        before = emulated_gpus[0].launches
        optimizer.apply_gradients(pairs)
        assert emulated_gpus[0].launches - before == launches


def test_a_gradient_in_its_variables_memory_is_read_first() -> None:
    start = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
    array, apart = start.copy(), Variable(start)
    gpuopt.LARSOptimizer(**NUMBERS).apply_gradients([(array[::-1], array)])
    gpuopt.LARSOptimizer(**NUMBERS).apply_gradients([(start[::-1], apart)])
    assert np.array_equal(array, apart.numpy())


@pytest.mark.parametrize(
    "every_cpu_form",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)],
    indirect=True,
)
@pytest.mark.parametrize("use_nesterov", [False, True])
@every_dtype
@pytest.mark.one_in(6)
def test_large_and_small_variables_step_in_each_form(
    dtype: Any, use_nesterov: bool, every_cpu_form: None
) -> None:
    rng = np.random.default_rng(4)
    named = {"kernel": 300_000, "scale": 3, "tall": 40_000, "bias": 30_000}
    variables = [Variable(rng.normal(size=n).astype(dtype), name=x) for x, n in named.items()]
    gradients = [rng.normal(size=variable.size).astype(dtype) for variable in variables]
    states = [variable.numpy().astype(np.float64) for variable in variables]
    optimizer = gpuopt.LARSOptimizer(**NUMBERS, skip_list=["bias"], use_nesterov=use_nesterov)
    for _ in range(2):
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    tolerance = 6 * float(ml_dtypes.finfo(dtype).eps)
    for start, gradient, variable in zip(states, gradients, variables, strict=True):
        history = [(step, gradient.astype(np.float64)) for step in (1, 2)]
        skipped = ["bias"] if variable.name == "bias" else None
        own = {"skip_list": skipped, "use_nesterov": use_nesterov}
        expected = textbook.lars(start, history, **NUMBERS, **own)
        got = variable.numpy().astype(np.float64)
        np.testing.assert_allclose(got, expected["var"], rtol=tolerance, atol=tolerance)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"momentum": -0.1}, "momentum must be at least 0, got -0.1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"skip_list": "bias"}, "skip_list must be a list of texts, got 'bias'"),
        ({"skip_list": 3}, "skip_list must be a list of texts, got 3"),
        ({"skip_list": [3]}, r"skip_list must be a list of texts, got \[3\]"),
        ({"eeta": "small"}, "eeta must be a number"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        gpuopt.LARSOptimizer(**{**NUMBERS, **wrong})
