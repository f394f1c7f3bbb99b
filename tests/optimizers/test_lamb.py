"""LAMB: sums over whole variables of what each element would do, in every place and type."""

from __future__ import annotations

from functools import partial
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
import textbook
from dtypes import every_dtype
from each_device import variable_on
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable

# An epsilon beside which the smallest `v` of 16 bits may be zero.
NUMBERS = {"learning_rate": 0.125, "beta2": 0.75, "epsilon": 0.25, "weight_decay": 0.25}


def check(optimizer: Any, variables: list[Variable], expected: list[dict[str, Any]]) -> None:
    for variable, state in zip(variables, expected, strict=True):
        # Each of three steps rounds the weight and its slots, once each.
        tolerance = 9 * float(ml_dtypes.finfo(variable.dtype).eps)
        slots = {name: optimizer.get_slot(variable, name) for name in ("m", "v")}
        for name, got in {"var": variable, **slots}.items():
            np.testing.assert_allclose(
                got.numpy().astype(np.float64), state[name], rtol=tolerance, atol=tolerance
            )


def trained(start: np.ndarray, gradients: list[np.ndarray], **numbers: Any) -> dict[str, Any]:
    history = [(t + 1, g.astype(np.float64)) for t, g in enumerate(gradients)]
    return textbook.lamb(start.astype(np.float64), history, **{**NUMBERS, **numbers})


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (100_003,)], ids=str)
@every_dtype
@pytest.mark.one_in(3)
def test_steps_are_the_textbooks(dtype: Any, shape: tuple[int, ...], xp: Any) -> None:
    rng = np.random.default_rng(1)
    start = rng.normal(size=shape).astype(dtype)
    gradients = [np.asarray(rng.normal(size=shape)).astype(dtype) for _ in range(3)]
    gradients[1][...] = 0
    w = variable_on(xp, start)
    optimizer = gpuopt.LAMBOptimizer(**NUMBERS)
    for gradient in gradients:
        optimizer.apply_gradients([(xp.asarray(gradient), w)])
    check(optimizer, [w], [trained(start, gradients)])


@pytest.mark.parametrize("use_nvlamb", [False, True])
def test_variables_have_ratios_of_their_own_and_groups_decay_of_theirs(
    use_nvlamb: bool, xp: Any
) -> None:
    rng = np.random.default_rng(2)
    names = ["kernel", "layer/bias", "tall", "scale", "empty"]
    starts = [rng.normal(size=n).astype(np.float32) for n in (70_000, 4, 3000, 5, 0)]
    variables = [
        variable_on(xp, start, name=name) for start, name in zip(starts, names, strict=True)
    ]
    groups = [ParameterGroup("bias|scale", weight_decay=0.0), ParameterGroup("tall", beta1=0.5)]
    optimizer = gpuopt.LAMBOptimizer(**NUMBERS, use_nvlamb=use_nvlamb, groups=groups)
    steps = [[rng.normal(size=s.size).astype(np.float32) for s in starts] for _ in range(3)]
    for gradients in steps:
        pairs = zip(map(xp.asarray, gradients), variables, strict=True)
        optimizer.apply_gradients(list(pairs))
    own = [{}, {"weight_decay": 0.0}, {"beta1": 0.5}, {"weight_decay": 0.0}, {}]
    expected = [
        trained(start, [step[i] for step in steps], use_nvlamb=use_nvlamb, **own[i])
        for i, start in enumerate(starts)
    ]
    check(optimizer, variables, expected)


def test_more_groups_than_are_passed_by_value_have_their_own_decay(xp: Any) -> None:
    rng = np.random.default_rng(3)
    starts = [rng.normal(size=3).astype(np.float32) for _ in range(70)]
    variables = [variable_on(xp, start, name=f"w{i}") for i, start in enumerate(starts)]
    decays = [0.01 * (1 + i) for i in range(70)]
    optimizer = gpuopt.LAMBOptimizer(
        **NUMBERS,
        groups=[
            ParameterGroup(variables=[variable], weight_decay=decay)
            for variable, decay in zip(variables, decays, strict=True)
        ],
    )
    gradient = rng.normal(size=3).astype(np.float32)
    for _ in range(2):
        optimizer.apply_gradients([(xp.asarray(gradient), variable) for variable in variables])
    expected = [
        trained(start, [gradient, gradient], weight_decay=decay)
        for start, decay in zip(starts, decays, strict=True)
    ]
    check(optimizer, variables, expected)


@every_dtype
def test_a_sparse_gradient_makes_the_step_of_a_dense_one(dtype: Any, xp: Any) -> None:
    rng = np.random.default_rng(4)
    start = rng.normal(size=(40, 3)).astype(dtype)
    tables = [variable_on(xp, start) for _ in range(2)]
    others = [variable_on(xp, start[:7, :2].copy()) for _ in range(2)]
    rows = np.array([3, 1, 3, 39, 0])
    values = (rng.integers(-4, 4, (5, 3)) / 4).astype(dtype)
    dense = np.zeros((40, 3))
    np.add.at(dense, rows, values.astype(np.float64))
    sparse = IndexedSlices(xp.asarray(values), xp.asarray(rows))
    few = IndexedSlices(xp.asarray(values[:2, :2].copy()), xp.asarray(rows[:2]))
    dense_few = np.zeros((7, 2))
    np.add.at(dense_few, rows[:2], values[:2, :2].astype(np.float64))
    optimizers = [gpuopt.LAMBOptimizer(**NUMBERS) for _ in range(2)]
    for _ in range(2):
        optimizers[0].apply_gradients([(sparse, tables[0]), (few, others[0])])
        wide, narrow = (xp.asarray(g.astype(dtype)) for g in (dense, dense_few))
        optimizers[1].apply_gradients([(wide, tables[1]), (narrow, others[1])])
    assert np.array_equal(tables[0].numpy(), tables[1].numpy())
    assert np.array_equal(others[0].numpy(), others[1].numpy())
    assert not np.array_equal(tables[0].numpy()[2], start[2])


@pytest.mark.emulator
@pytest.mark.parametrize(
    "make", [gpuopt.LAMBOptimizer, partial(gpuopt.LARSOptimizer, 0.1), gpuopt.AdamOptimizer]
)
@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 0.5}], ids=str)
def test_sums_over_an_update_take_one_launch_more(
    make: Any, clipping: dict[str, Any], emulated_gpus: list[EmulatorLauncher]
) -> None:
    starts = [np.ones(n, np.float32) for n in (70_000, 5, 3000)]
    variables = [variable_on(fake_cupy, start) for start in starts]
    pairs = [(fake_cupy.asarray(start), v) for start, v in zip(starts, variables, strict=True)]
    optimizer = make(**clipping)
    for _ in range(2):
        before = emulated_gpus[0].launches
        optimizer.apply_gradients(pairs)
    # Those over a gradient and a variable are summed by the launch that measures the gradient.
    has_sums = bool(optimizer.rule.sums) and not (optimizer.rule.degrees and clipping)
    assert emulated_gpus[0].launches - before == 1 + has_sums + bool(clipping)


@pytest.mark.parametrize("zero", ["weights", "update"])
def test_the_ratio_is_1_where_a_norm_is_zero(zero: str, xp: Any) -> None:
    without_weights = zero == "weights"
    w = variable_on(xp, np.zeros(2) if without_weights else np.array([3.0, 4.0]))
    gradient = np.ones(2) if without_weights else np.zeros(2)
    numbers = {"epsilon": 0.0, "weight_decay": 0.25} if without_weights else {"weight_decay": 0.0}
    optimizer = gpuopt.LAMBOptimizer(0.5, use_nvlamb=True, **numbers)
    optimizer.apply_gradients([(xp.asarray(gradient), w)])
    expected = [-0.5, -0.5] if without_weights else [3.0, 4.0]
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)


def test_bad_rows_on_a_gpu_change_nothing(xp: Any) -> None:
    start = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
    table, w = variable_on(xp, start), variable_on(xp, start)
    optimizer = gpuopt.LAMBOptimizer(**NUMBERS)
    good = IndexedSlices(xp.asarray(np.ones((1, 2), np.float32)), xp.asarray(np.array([1])))
    bad = IndexedSlices(xp.asarray(np.ones((1, 2), np.float32)), xp.asarray(np.array([4])))
    optimizer.apply_gradients([(good, table), (xp.asarray(start), w)])
    before = [table.numpy(), w.numpy(), optimizer.get_slot(w, "m").numpy()]

    def step() -> None:
        optimizer.apply_gradients([(bad, table), (xp.asarray(start), w)])
        table.numpy()

    with pytest.raises(IndexError, match="4"):
        step()
    after = [table.numpy(), w.numpy(), optimizer.get_slot(w, "m").numpy()]
    assert all(map(np.array_equal, before, after))


def test_steps_have_the_same_bits_on_every_run(xp: Any) -> None:
    rng = np.random.default_rng(6)
    start, gradient = rng.normal(size=(2, 100_003)).astype(np.float32)
    runs = []
    for _ in range(2):
        w = variable_on(xp, start)
        gpuopt.LAMBOptimizer(**NUMBERS).apply_gradients([(xp.asarray(gradient), w)])
        runs.append(w.numpy().tobytes())
    assert runs[0] == runs[1]


def test_arrays_that_are_not_contiguous_are_summed(xp: Any) -> None:
    start, gradient = np.random.default_rng(7).normal(size=(2, 50, 8)).astype(np.float32)
    if xp is fake_cupy:
        pytest.skip("its arrays have no strides")
    w = xp.asarray(start.copy())[:, ::2]
    gpuopt.LAMBOptimizer(**NUMBERS).apply_gradients([(xp.asarray(gradient)[:, 1::2], w)])
    expected = trained(start[:, ::2], [gradient[:, 1::2]])
    got = w if xp is np else w.get()
    np.testing.assert_allclose(got, expected["var"], rtol=1e-5, atol=1e-6)


@pytest.mark.emulator
def test_all_sums_take_one_launch_more_and_the_host_waits_for_none(emulated_gpus: Any) -> None:
    variables = [Variable(np.ones(n, np.float32), device="gpu:0") for n in (9, 5000)]
    pairs = [(fake_cupy.asarray(np.ones(v.shape, np.float32)), v) for v in variables]
    optimizer = gpuopt.LAMBOptimizer(**NUMBERS)
    optimizer.apply_gradients(pairs)
    waits, launches = fake_cupy.counts.synchronisations, emulated_gpus[0].launches
    optimizer.apply_gradients(pairs)
    assert fake_cupy.counts.synchronisations == waits
    assert emulated_gpus[0].launches == launches + 2


def test_a_gradient_in_its_variables_memory_is_read_first() -> None:
    start = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
    array, apart = start.copy(), Variable(start)
    gpuopt.LAMBOptimizer(**NUMBERS).apply_gradients([(array[::-1], array)])
    gpuopt.LAMBOptimizer(**NUMBERS).apply_gradients([(start[::-1], apart)])
    assert np.array_equal(array, apart.numpy())


@pytest.mark.parametrize(
    "every_cpu_form",
    ["plain", "replayed", pytest.param("compiled", marks=pytest.mark.cxx)],
    indirect=True,
)
@every_dtype
@pytest.mark.one_in(4)
def test_large_and_small_variables_step_in_each_form(dtype: Any, every_cpu_form: None) -> None:
    rng = np.random.default_rng(8)
    starts = [rng.normal(size=n).astype(dtype) for n in (300_000, 3, 40_000)]
    gradients = [rng.normal(size=start.size).astype(dtype) for start in starts]
    variables = [Variable(start) for start in starts]
    optimizer = gpuopt.LAMBOptimizer(**NUMBERS)
    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    check(optimizer, variables, [trained(s, [g]) for s, g in zip(starts, gradients, strict=True)])
