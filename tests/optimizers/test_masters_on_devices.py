"""Master copies on every kind of device: the steps are the host's, and one launch makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from each_device import variable_on
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.rules.split import split

pytestmark = pytest.mark.value

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
SHAPES = [(), (3,), (40,), (5, 3), (0,), (3000,)]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": lambda **more: gpuopt.AdamOptimizer(0.01, **more),
    "adam-w": lambda **more: gpuopt.AdamWOptimizer(0.01, 0.01, **more),
    "momentum": lambda **more: gpuopt.MomentumOptimizer(0.01, 0.9, **more),
    "lamb": lambda **more: gpuopt.LAMBOptimizer(0.01, **more),
    "row-wise": lambda **more: gpuopt.RowWiseAdagradOptimizer(0.01, **more),
}


def adam(masters: Any = "float32") -> Any:
    return gpuopt.AdamOptimizer(0.01, masters=masters)


def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def after_steps(
    xp: Any, make: Callable[..., Any], masters: Any, dtype: Any, **options: Any
) -> list[np.ndarray]:
    """Makes three steps, and an assignment in between; returns the variables and all slots."""
    variables = [
        variable_on(xp, normal(i, shape, dtype), name=f"w{i}") for i, shape in enumerate(SHAPES)
    ]
    table = variable_on(xp, normal(9, (40, 12), dtype), name="table")
    optimizer = make(masters=masters, **options)
    for step in range(3):
        pairs = [
            (xp.asarray(normal(10 * step + i, v.shape, dtype)), v) for i, v in enumerate(variables)
        ]
        rows = np.random.default_rng(step).integers(0, 40, 100)
        values = xp.asarray(normal(step, (100, 12), dtype))
        optimizer.apply_gradients([*pairs, (IndexedSlices(values, xp.asarray(rows)), table)])
        variables[2].assign_add(xp.asarray(np.ones(40, dtype)))
    written = [*variables, table]
    slots = [optimizer.get_slot(v, name) for v in written for name in optimizer.get_slot_names()]
    for each in written:
        master = optimizer.get_slot(each, "master").numpy()
        rounded = master.astype(dtype) if masters == "float32" else split(master)[0]
        np.testing.assert_array_equal(each.numpy(), rounded)
    return [each.numpy() for each in slots]


@pytest.mark.parametrize(
    ("name", "masters", "dtype"),
    # The loops around a rule depend on the types, and not on the rule.
    [
        ("adam", "float32", DTYPES[0]),
        ("adam", "remainder", DTYPES[1]),
        ("lamb", "remainder", DTYPES[1]),
        *((name, "float32", DTYPES[1]) for name in OPTIMIZERS),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_every_device_makes_the_same_steps(name: str, masters: Any, dtype: Any, xp: Any) -> None:
    groups = [ParameterGroup("w[34]", learning_rate=0.5), ParameterGroup("w5", clip_value=0.25)]
    for options in ({}, {"clip_norm": 2.0, "groups": groups}):
        got, expected = (
            after_steps(m, OPTIMIZERS[name], masters, dtype, **options) for m in (xp, np)
        )
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype == np.float32
            np.testing.assert_allclose(mine, theirs, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("masters", "dtype"),
    [*(("float32", dtype) for dtype in DTYPES), ("remainder", DTYPES[1])],
    ids=str,
)
def test_of_a_variable_and_its_master_what_was_written_last_counts(
    masters: Any, dtype: Any, xp: Any
) -> None:
    w, optimizer = variable_on(xp, np.ones(4, dtype)), adam(masters)
    optimizer.apply_gradients([(xp.asarray(np.ones(4, dtype)), w)])
    master = optimizer.get_slot(w, "master")
    kept = master.numpy()[1:].copy()
    w[0] = 3
    np.testing.assert_array_equal(master.numpy(), [3, *kept])
    master.assign(np.float32([1, 2, 3, 4.0001]))
    np.testing.assert_array_equal(w.numpy(), np.asarray([1, 2, 3, 4], dtype))
    gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(xp.asarray(np.ones(4, dtype)), w)])
    np.testing.assert_array_equal(master.numpy(), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("masters", "dtype", "slot_dtype"),
    [
        ("float32", DTYPES[0], None),
        ("float32", DTYPES[1], "bfloat16"),
        ("remainder", DTYPES[1], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_tracked", [False, True], ids=["made in a step", "made before"])
def test_averages_are_of_the_master_copy(
    is_tracked: bool, masters: Any, dtype: Any, slot_dtype: Any, xp: Any
) -> None:
    averages = gpuopt.ExponentialMovingAverage(0.75)
    w = variable_on(xp, normal(0, (300,), dtype), name="w")
    table = variable_on(xp, normal(1, (40, 12), dtype), name="table")
    optimizer = gpuopt.AdamOptimizer(
        1e-3, masters=masters, averages=averages, slot_dtype=slot_dtype, clip_norm=2.0
    )
    expected: dict[str, Any] = {}
    if is_tracked:
        averages.track([w, table])
        expected = {each.name: each.numpy().astype(np.float32) for each in (w, table)}
    for step in range(4):
        slices = IndexedSlices(
            xp.asarray(normal(step, (5, 12), dtype)), xp.asarray(np.array([1, 3, 1, 0, 39]))
        )
        gradient = xp.asarray(normal(9 + step, (300,), dtype))
        optimizer.apply_gradients([(gradient, w), (slices, table)])
        for each in (w, table):
            master = optimizer.get_slot(each, "master").numpy()
            before = expected.get(each.name, master)
            expected[each.name] = before - (before - master) * np.float32(0.25)
            average = averages.average(each)
            assert average is not None
            assert average.dtype == np.float32
            np.testing.assert_allclose(average.numpy(), expected[each.name], rtol=0, atol=1e-6)


def test_rows_come_and_go_with_their_masters(xp: Any) -> None:
    table, optimizer = variable_on(xp, normal(0, (6, 4), np.float16), name="table"), adam()
    optimizer.apply_gradients([(xp.asarray(normal(1, (6, 4), np.float16)), table)])
    before = optimizer.get_slot(table, "master").numpy()
    gpuopt.rows(table).keep([4, 1])
    gpuopt.rows(table).append(xp.asarray(np.full((1, 4), 0.1, np.float16)), state_of=[0])
    added = np.full((1, 4), np.float32(np.float16(0.1)))
    expected = np.concatenate([before[[4, 1]], added])
    np.testing.assert_array_equal(optimizer.get_slot(table, "master").numpy(), expected)
    optimizer.apply_gradients([(xp.asarray(normal(2, (3, 4), np.float16)), table)])
    master = optimizer.get_slot(table, "master").numpy()
    np.testing.assert_array_equal(table.numpy(), master.astype(np.float16))


@pytest.mark.emulator
@pytest.mark.parametrize("slot_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("is_averaged", [False, True], ids=["", "averaged"])
@pytest.mark.parametrize("masters", ["float32", "remainder"])
def test_a_step_is_one_launch_and_the_host_waits_for_nothing(
    masters: Any, is_averaged: bool, slot_dtype: Any, emulated_gpus: list[EmulatorLauncher]
) -> None:
    if is_averaged and slot_dtype is not None:
        pytest.skip("averages are moved after the update then")
    w = Variable(np.ones(3000, DTYPES[1]), device="gpu:0")
    averages = gpuopt.ExponentialMovingAverage(0.5) if is_averaged else None
    optimizer = gpuopt.AdamOptimizer(
        0.01, masters=masters, averages=averages, slot_dtype=slot_dtype
    )
    gradient = fake_cupy.asarray(np.ones(3000, DTYPES[1]))
    for _ in range(3):
        launches, waits = emulated_gpus[0].launches, fake_cupy.counts.synchronisations
        optimizer.apply_gradients([(gradient, w)])
    assert emulated_gpus[0].launches - launches == 1
    assert fake_cupy.counts.synchronisations == waits


def step_and_read(optimizer: Any, gradient: Any, variable: Variable) -> None:
    """A GPU finds a bad row after the host has gone on."""
    optimizer.apply_gradients([(gradient, variable)])
    variable.numpy()


def test_a_bad_row_changes_neither_variable_nor_master(xp: Any) -> None:
    table, optimizer = variable_on(xp, normal(0, (6, 4), np.float16)), adam()
    values = xp.asarray(normal(1, (2, 4), np.float16))
    optimizer.apply_gradients([(IndexedSlices(values, xp.asarray(np.array([1, 2]))), table)])
    before = optimizer.get_slot(table, "master").numpy(), table.numpy()
    refused = IndexedSlices(values, xp.asarray(np.array([1, 6])))
    with pytest.raises(IndexError):
        step_and_read(optimizer, refused, table)
    after = optimizer.get_slot(table, "master").numpy(), table.numpy()
    for mine, old in zip(after, before, strict=True):
        np.testing.assert_array_equal(mine, old)
