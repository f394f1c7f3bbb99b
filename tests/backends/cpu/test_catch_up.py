"""Rows that catch up are where rows that made all steps are, to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpuopt.backends import Target, backend_for
from gpuopt.backends.backend import SparseUpdate
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp
from gpuopt.backends.cpu.threads import num_threads
from gpuopt.device import Device
from gpuopt.optimizers.adam import adam
from gpuopt.rules.catch_up import Factors

HEIGHT = 120

pytestmark = pytest.mark.usefixtures("every_cpu_form")


class Table:
    """A table of Adam's in host memory, with the steps that its rows have missed."""

    def __init__(
        self,
        real: Any,
        *,
        stepping: bool,
        epsilon: float,
        height: int = HEIGHT,
        beta2: float = 0.999,
    ) -> None:
        self.real = real
        self.backend = backend_for(Device.cpu)
        self.scalars = {
            "step_size": real(0),
            "beta1": real(np.float32(0.9)),
            "beta2": real(np.float32(beta2)),
            "epsilon": real(epsilon),
        }
        self.var, self.m, self.v = (np.zeros((height, 1), real) for _ in range(3))
        self.plan = self.backend.plan_dense([Target(self.var, [self.m, self.v])])
        factors = Factors(adam, self.scalars, real, stepping=stepping)
        zeros = partial(np.zeros, dtype=real)
        self.catch_up = CatchUp(adam, factors, np.zeros(height, np.int32), zeros)

    def step(self, rows: np.ndarray, values: np.ndarray, step_size: float) -> None:
        if self.catch_up.now == self.catch_up.room:
            self.read()
            self.backend.late_rows.begin_anew(self.catch_up)
        scalars = {**self.scalars, "step_size": self.real(step_size)}
        update = SparseUpdate(self.plan, values.astype(self.real), rows, 0, self.catch_up)
        self.backend.apply_sparse(adam, [update], [scalars], other_rows=None)

    def read(self, rows: Any = None) -> np.ndarray:
        self.backend.late_rows.bring_up(self.plan, self.catch_up, rows)
        return self.var


class AllRows:
    """TensorFlow's Adam, which moves all rows in each step."""

    def __init__(
        self, real: Any, epsilon: float, height: int = HEIGHT, beta2: float = 0.999
    ) -> None:
        self.real, self.epsilon = real, real(epsilon)
        # As float32 has them: else they differ in the eighth digit.
        self.beta1, self.beta2 = real(np.float32(0.9)), real(np.float32(beta2))
        self.var, self.m, self.v = (np.zeros((height, 1), real) for _ in range(3))

    def step(self, rows: np.ndarray, values: np.ndarray, step_size: float) -> None:
        real = self.real
        gradient = np.zeros_like(self.var)
        np.add.at(gradient, rows, values.astype(real))
        self.m += (1 - self.beta1) * (gradient - self.m)
        self.v += (1 - self.beta2) * (gradient * gradient - self.v)
        self.var -= real(step_size) * self.m / (np.sqrt(self.v) + self.epsilon)


def constant(step: int) -> float:
    return 1e-2


def cosine(step: int) -> float:
    return 1e-2 * (0.5 + 0.5 * math.cos(math.pi * step / 10_000))


def waves(step: int) -> float:
    """Falls, rises, is 0 for a while, and turns its sign."""
    return 0.0 if step % 97 < 20 else 1e-2 * math.sin(step / 31)


def step_size(rate: Callable[[int], float], step: int) -> float:
    return rate(step) * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)


def zipf_steps(steps: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, HEIGHT + 1)
    named = rng.choice(HEIGHT, (steps, 6), p=shares / shares.sum())
    return list(zip(named, rng.normal(0.2, 1, (steps, 6, 1)), strict=True))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Of two tables that began at 0, as a part of the movement of the second."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize(
    ("rate", "epsilon", "steps"),
    [(cosine, 1e-5, 10_000), (constant, 1e-8, 1_500), (cosine, 1e-3, 1_500)],
)
def test_rows_are_as_close_to_all_steps_as_float32_itself(
    rate: Callable[[int], float], epsilon: float, steps: int, every_cpu_form: str
) -> None:
    if every_cpu_form != "compiled":  # numpy's calls would take most of a minute together
        steps = 1_500
    table = Table(np.float32, stepping=False, epsilon=epsilon)
    exact, rounded = AllRows(np.float64, epsilon), AllRows(np.float32, epsilon)
    for step, (rows, values) in enumerate(zipf_steps(steps, seed=3), start=1):
        values = values.astype(np.float32)
        for each in (table, exact, rounded):
            each.step(rows, values, step_size(rate, step))
        if step % 487 == 0 or step == steps:
            theirs = distance(rounded.var, exact.var)
            assert distance(table.read(), exact.var) <= max(theirs, 1e-6), step


@pytest.mark.parametrize(("stepping", "bound"), [(False, 1e-7), (True, 1e-11)])
@pytest.mark.parametrize("rate", [constant, cosine, waves])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
def test_float64_is_close_by_sums_and_closer_step_by_step(
    rate: Callable[[int], float], epsilon: float, *, stepping: bool, bound: float
) -> None:
    table = Table(np.float64, stepping=stepping, epsilon=epsilon)
    exact = AllRows(np.float64, epsilon)
    for step, (rows, values) in enumerate(zipf_steps(700, seed=4), start=1):
        table.step(rows, values, step_size(rate, step))
        exact.step(rows, values, step_size(rate, step))
        if step % 233 == 0:
            assert distance(table.read(), exact.var) <= bound


@pytest.mark.parametrize("gap", [0, 1, 255, 256, 257, 307, 308, 309, 2_000])
@pytest.mark.parametrize("gradient", [1.0, 1e-3, 1e-7, 1e-18, 0.0])
@pytest.mark.parametrize("stepping", [False, True])
def test_one_row_catches_up_over_a_gap(gap: int, gradient: float, *, stepping: bool) -> None:
    epsilon = 1e-5
    table = Table(np.float32, stepping=stepping, epsilon=epsilon, height=2)
    exact = AllRows(np.float64, epsilon, height=2)
    for step in range(1, 2 + gap):
        rows, values = np.array([min(step - 1, 1)]), np.array([[gradient]])
        for each in (table, exact):
            each.step(rows, values, step_size(constant, step))
    table.read(np.array([0]))
    assert table.catch_up.last[0] == table.catch_up.now
    np.testing.assert_allclose(table.var[0], exact.var[0], rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(table.m[0], exact.m[0], rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(table.v[0], exact.v[0], rtol=2e-6 + 4e-8 * gap, atol=1e-37)


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


def test_steps_take_20_bytes_each_in_float32() -> None:
    table = Table(np.float32, stepping=False, epsilon=1e-8)
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
