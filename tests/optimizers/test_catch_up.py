"""Optimizers with `catch_up` do what TensorFlow's do, and what they do without it."""

from __future__ import annotations

import math
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from catching_up import CASES, OPTIMIZERS, TOLERANCE, CatchingUp, roundings_of_a_named_row
from golden_cases import error, kind_of_case
from late_pairs import Pair, close

import gpuopt

ways = pytest.mark.parametrize("catch_up", [True, "stepping"])


@ways
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
@pytest.mark.one_in(24, case=kind_of_case)
def test_rows_that_catch_up_step_like_tensorflows(
    case: dict[str, Any], catch_up: Any, every_place: str
) -> None:
    golden = CatchingUp(case, catch_up)
    for key, rows in golden.replay(device=every_place).items():
        assert error(rows, golden.arrays[key][1:]) <= TOLERANCE[case["dtype"]], key


@ways
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clipping", [{}, {"clip_norm": 0.5}, {"clip_value": 0.3}], ids=str)
@pytest.mark.one_in(16)
def test_every_optimizer_ends_where_it_ends_without(
    clipping: dict[str, float], name: str, dtype: Any, catch_up: Any, every_place: str
) -> None:
    pair = Pair(OPTIMIZERS[name], dtype=dtype, device=every_place, catch_up=catch_up, **clipping)
    pair.step(60)
    assert pair.is_behind()
    # A slot is rounded once in a step without, and once for all of them with it.
    tolerance = 60 * 4 * np.finfo(dtype).eps if dtype is np.float32 else 1e-7
    close(pair.late, pair.exact, tolerance)
    for slot in pair.all_rows.get_slot_names():
        np.testing.assert_allclose(*pair.slot(slot), rtol=tolerance, atol=1e-12)


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize("width", [1, 15, 16, 17, 64, 65, 130])
def test_rows_of_every_width_end_where_they_end_without(width: int) -> None:
    rng = np.random.default_rng(4)
    late, exact = (gpuopt.Variable(np.zeros((9, width))) for _ in range(2))
    catching_up, plain = gpuopt.AdamOptimizer(0.01, catch_up=True), gpuopt.AdamOptimizer(0.01)
    for _ in range(12):
        slices = gpuopt.IndexedSlices(rng.normal(size=(3, width)), rng.integers(0, 9, 3))
        catching_up.apply_gradients([(slices, late)])
        plain.apply_gradients([(slices, exact)])
    np.testing.assert_allclose(late.numpy(), exact.numpy(), rtol=1e-7, atol=1e-9)
    for slot in plain.get_slot_names():
        mine, theirs = catching_up.get_slot(late, slot), plain.get_slot(exact, slot)
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_rows_that_step_one_by_one_have_the_bits_of_all_rows_at_every_read(
    name: str, dtype: Any, every_cpu_form: str
) -> None:
    """By the same form of the rule: each may round its last digit otherwise."""
    rng = np.random.default_rng(2)
    value = rng.normal(size=(90, 5)).astype(dtype)
    late, exact = (gpuopt.Variable(value) for _ in range(2))
    stepping, plain = OPTIMIZERS[name](0.01, catch_up="stepping"), OPTIMIZERS[name](0.01)
    for step in range(200 if os.environ.get("GPUOPT_FULL") else 60):
        rows = rng.zipf(1.3, 6) % 90
        slices = gpuopt.IndexedSlices(rng.normal(size=(6, 5)).astype(dtype), rows)
        stepping.apply_gradients([(slices, late)])
        plain.apply_gradients([(slices, exact)])
        if step % 7 == 0:
            read = rng.integers(0, 90, 5)
            mine, theirs = (gpuopt.embedding_lookup(each, read) for each in (late, exact))
            assert mine.tobytes() == theirs.tobytes()
    assert late.numpy().tobytes() == exact.numpy().tobytes()
    for slot in plain.get_slot_names():
        mine, theirs = stepping.get_slot(late, slot), plain.get_slot(exact, slot)
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_named_row_is_rounded_once(name: str, every_place: str) -> None:
    assert roundings_of_a_named_row(name, every_place) <= 0.53


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_named_row_of_16_bits_is_rounded_once(dtype: Any, device: str) -> None:
    assert roundings_of_a_named_row("AdamW", device, dtype) <= 0.53


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("epsilon", "catch_up"), [(1e-8, True), (1e-3, True), (1e-8, "stepping")])
@pytest.mark.one_in(4)
def test_16_bit_tables_step_like_the_textbook(
    epsilon: float, catch_up: Any, dtype: Any, device: str
) -> None:
    rng = np.random.default_rng(2)
    value = rng.normal(size=(12, 3)).astype(dtype)
    table = gpuopt.Variable(value, device=device)
    optimizer = gpuopt.AdamOptimizer(0.01, epsilon=epsilon, catch_up=catch_up)
    histories: list[list[Any]] = [[] for _ in value]
    for step in range(1, 80):
        row = int(rng.integers(0, len(value)))
        gradient = rng.normal(size=(1, 3)).astype(dtype)
        optimizer.apply_gradients([(gpuopt.IndexedSlices(gradient, [row]), table)])
        for at, history in enumerate(histories):
            history.append((step, gradient[0].astype(np.float64) if at == row else np.zeros(3)))
    got = table.numpy().astype(np.float64)
    for row, history in enumerate(histories):
        expected = textbook.adam(
            value[row].astype(np.float64), history, learning_rate=0.01, epsilon=epsilon
        )
        # Stored in 16 bits whenever it was named: 7 times or so.
        bound = 16 * float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(got[row], expected["var"], rtol=bound, atol=bound)


@pytest.mark.usefixtures("every_cpu_form")
@pytest.mark.parametrize(
    "scalars",
    [{"beta1": 0.2, "beta2": 0.1}, {"beta1": 0.05, "beta2": 0.01}, {"epsilon": math.inf}],
    ids=str,
)
def test_rows_that_were_never_named_stay_though_sums_are_infinite(scalars: Any) -> None:
    table = gpuopt.Variable(np.ones((6, 2), np.float32))
    optimizer = gpuopt.AdamOptimizer(catch_up=True, **scalars)
    for _ in range(100):
        gradient = gpuopt.IndexedSlices(np.ones((1, 2), np.float32), [1])
        optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_array_equal(np.delete(table.numpy(), 1, axis=0), 1)


def test_an_epsilon_below_0_is_stepped() -> None:
    rng = np.random.default_rng(3)
    value = rng.normal(size=(12, 2))
    late, exact = gpuopt.Variable(value), gpuopt.Variable(value)
    optimizers = [
        gpuopt.AdamOptimizer(epsilon=-1e-3, catch_up=True),
        gpuopt.AdamOptimizer(epsilon=-1e-3),
    ]
    for step in range(80):
        rows = rng.integers(0, 4 if step > 3 else 12, 4)
        gradient = gpuopt.IndexedSlices(rng.normal(size=(4, 2)), rows)
        for optimizer, table in zip(optimizers, (late, exact), strict=True):
            optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_allclose(late.numpy(), exact.numpy(), rtol=1e-11)
