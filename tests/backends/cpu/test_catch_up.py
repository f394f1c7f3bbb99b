"""Rows that catch up are where rows that made all steps are, to rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from late_tables import (
    AllRows,
    Table,
    check_reads,
    constant,
    cosine,
    distances,
    read_tables,
    step_size,
)

from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp
from gpuopt.backends.cpu.threads import num_threads
from gpuopt.optimizers.adam import adam
from gpuopt.rules.catch_up import NUM_SUMS, STRIDE, Factors

FULL = bool(os.environ.get("GPUOPT_FULL"))
pytestmark = pytest.mark.usefixtures("every_cpu_form")


@pytest.mark.parametrize("rate", [cosine, constant])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3])
@pytest.mark.one_in(18)
def test_rows_are_as_close_to_all_steps_as_float32_itself(
    rate: Callable[[int], float], epsilon: float
) -> None:
    for step, ours, of_all_rows, of_writes in distances(
        rate, epsilon, 10_000 if FULL else 1_000, seeds=20
    ):
        assert ours <= max(of_all_rows, 1e-6), step
        assert ours <= 1.25 * of_writes, step


@pytest.mark.parametrize("rate", [cosine, constant])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-5, 1e-3])
@pytest.mark.one_in(18)
def test_each_read_of_2_000_rows_and_its_rows_are_as_close_to_all_steps_as_float32_itself(
    rate: Callable[[int], float], epsilon: float
) -> None:
    """So many that chance plays no part in the distance of a table. It does in that of a row."""
    steps = 10_000 if FULL else 750
    reads = list(read_tables(rate, epsilon, steps))
    assert len(reads) == steps // 250
    check_reads(reads)


@pytest.mark.parametrize("stepping", [False, True])
def test_one_row_catches_up_over_a_million_steps(
    monkeypatch: pytest.MonkeyPatch, *, stepping: bool
) -> None:
    gap, counted = 1_000_000, 400
    monkeypatch.setattr(Factors, "room_for", lambda self, height: gap + 2)
    # v is a third of itself after a million steps, and a row moves for 308 of them as ever.
    table = Table(np.float32, stepping=stepping, epsilon=1e-8, height=2, beta2=1 - 2**-20)
    exact = AllRows(np.float64, 1e-8, height=2, beta2=1 - 2**-20)
    for step in range(1, counted + 1):
        rows, values = np.array([min(step - 1, 1)]), np.ones((1, 1))
        for each in (table, exact):
            each.step(rows, values, 1e-2)
    # Row 0 is named by none of the other steps, which only count.
    catch_up = table.catch_up
    catch_up.steps[counted:gap] = 1e-2
    catch_up.now = gap + 1
    table.read(np.array([0]))
    assert catch_up.last[0] == gap + 1
    np.testing.assert_allclose(table.var[0], exact.var[0], rtol=4e-6)
    np.testing.assert_array_equal(table.m[0], 0)
    decayed = exact.v[0] * exact.beta2 ** (gap + 1 - counted)
    np.testing.assert_allclose(table.v[0], decayed, rtol=4e-6)


@pytest.mark.parametrize("extreme", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("slot", ["var", "m", "v"])
@pytest.mark.parametrize("stepping", [False, True])
def test_what_is_not_finite_stays_in_its_row(extreme: float, slot: str, *, stepping: bool) -> None:
    table = Table(np.float32, stepping=stepping, epsilon=1e-8, height=3)
    exact = AllRows(np.float32, 1e-8, height=3)
    with np.errstate(all="ignore"):
        for step in range(1, 30):
            rows = np.array([0, 1] if step == 1 else [2])
            values = np.ones((len(rows), 1))
            for each in (table, exact):
                each.step(rows, values, step_size(constant, step))
                if step == 1:
                    getattr(each, slot)[0] = extreme
        table.read()
    for name in ("var", "m", "v"):
        got, expected = getattr(table, name), getattr(exact, name)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_allclose(got[1:], expected[1:], rtol=4e-6)
        np.testing.assert_allclose(got[0], expected[0], rtol=4e-6)


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("gradient", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("beta2", [0.99, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.one_in(6)
def test_the_bound_sees_what_three_terms_leave_out(
    real: Any, gradient: float, beta2: float, sign: int
) -> None:
    epsilon = 1e-3
    table = Table(real, stepping=False, epsilon=epsilon, height=2, beta2=beta2)
    exact = AllRows(np.float64, epsilon, height=2, beta2=beta2)
    for step in range(1, 60):
        rows, values = np.array([min(step - 1, 1)]), np.array([[gradient]])
        for each in (table, exact):
            each.step(rows, values, sign * step_size(constant, step))
    np.testing.assert_allclose(
        table.read()[0], exact.var[0], rtol=2e-6 if real is np.float32 else 1e-7
    )


def test_the_bound_does_not_cancel_with_the_step_sizes() -> None:
    # Step sizes of both signs, which nearly cancel: the bound must not cancel with them.
    table = Table(np.float64, stepping=False, epsilon=1e-3, height=2)
    exact = AllRows(np.float64, 1e-3, height=2)
    for step in range(1, 60):
        rows, values = np.array([min(step - 1, 1)]), np.array([[1e-3]])
        for each in (table, exact):
            each.step(rows, values, (-1.0) ** step * 1.0531**step)
    table.read()
    assert abs(table.var[0] - exact.var[0]) <= 1e-6 * abs(exact.var[0])


@pytest.mark.parametrize("beta2", [1.01, 1.1])
def test_rows_whose_square_grows_are_stepped(beta2: float) -> None:
    table = Table(np.float64, stepping=False, epsilon=1.0, height=2, beta2=beta2)
    exact = AllRows(np.float64, 1.0, height=2, beta2=beta2)
    for each in (table, exact):
        each.m[:] = each.v[:] = 1
        for _ in range(60):
            each.step(np.array([1]), np.array([[1e-3]]), 1e-2)
    np.testing.assert_allclose(table.read()[0], exact.var[0], rtol=1e-11)


@pytest.mark.parametrize("signs", [1, -1])
@pytest.mark.parametrize("beta2", [0.999, 0.9])
def test_sums_follow_from_those_of_later_steps(signs: int, beta2: float) -> None:
    numbers = {"step_size": 0.01, "beta1": 0.9, "beta2": beta2, "epsilon": 1e-8}
    scalars = {name: np.float64(value) for name, value in numbers.items()}
    factors = Factors(adam, scalars, np.float64, stepping=False)
    assert factors.weights is not None
    assert factors.one_earlier is not None
    k = np.arange(1, factors.window + STRIDE)
    powers, growth = (0.9 / math.sqrt(beta2)) ** k, beta2 ** (-k / 2) - 1
    terms = np.stack([powers * growth**j for j in range(NUM_SUMS)], axis=1)
    sizes = np.float64(signs) ** k * np.random.default_rng(1).uniform(1, 2, len(k))

    def sums_of(first: int, weights: np.ndarray) -> np.ndarray:
        given = sizes[first : first + len(weights)]
        signed, absolute = (
            given @ weights[: len(given), :-1],
            abs(given) @ weights[: len(given), -1],
        )
        return np.append(signed, absolute)

    sums: Any = sums_of(STRIDE - 1, factors.weights[::-1])
    for last in reversed(range(STRIDE - 1)):
        sums = factors.one_earlier.sums(sums, sizes[last])
        *expected, least_bound = sums_of(last, terms)
        np.testing.assert_allclose(sums[:-1], expected, rtol=1e-12, atol=1e-14)
        assert least_bound * (1 - 1e-12) <= sums[-1] <= 1.5 * least_bound


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_steps_take_at_most_20_bytes_each(real: Any) -> None:
    table = Table(real, stepping=False, epsilon=1e-8)
    catch_up = table.catch_up
    assert (catch_up.steps.nbytes + catch_up.sums.nbytes) / catch_up.room <= 20


def test_a_hundred_small_tables_share_little_memory() -> None:
    table = Table(np.float32, stepping=False, epsilon=1e-8, height=1_000)
    assert 100 * (table.catch_up.steps.nbytes + table.catch_up.sums.nbytes) < 4e6


def test_a_tall_table_is_brought_up_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    bring_up_rows = CompiledCatchUp.bring_up_rows

    def count(self: CompiledCatchUp, *arguments: Any) -> None:
        calls.append(1)
        bring_up_rows(self, *arguments)

    monkeypatch.setattr(CompiledCatchUp, "bring_up_rows", count)
    table = Table(np.float32, stepping=False, epsilon=1e-8, height=2**21)
    table.step(np.array([0]), np.ones((1, 1)), 1e-3)
    table.read()
    assert (table.catch_up.last == 1).all()
    assert len(calls) <= 16 * num_threads() + 1


def test_rows_do_not_fall_behind_where_steps_count_for_ever() -> None:
    scalars = {"step_size": np.float32(1), "epsilon": np.float32(1e-8)}
    for beta1, beta2, may in ((0.9, 0.999, True), (0.99, 0.9, False), (0.9, 0.0, False)):
        betas = {"beta1": np.float32(beta1), "beta2": np.float32(beta2)}
        factors = Factors(adam, {**scalars, **betas}, np.float32, stepping=False)
        assert factors.fall_behind == may, betas
