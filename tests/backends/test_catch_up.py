"""Rows of a table catch up with all steps, by each form of the CPU and by kernels alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from late_tables import (
    AllRows,
    Table,
    constant,
    cosine,
    distance,
    error_of_squares,
    step_size,
    waves,
    zipf_steps,
)

from gpuopt.rules.catch_up import Factors

FULL = bool(os.environ.get("GPUOPT_FULL"))


@pytest.mark.parametrize("gap", [4, 2])
@pytest.mark.one_in(8)
def test_gaps_alike_do_not_add_up_one_error_of_a_power(gap: int, each_backend: Any) -> None:
    assert abs(error_of_squares(gap, each_backend)) <= 2e-7


@pytest.mark.parametrize(("stepping", "bound"), [(False, 1e-7), (True, 1e-11)])
@pytest.mark.parametrize("rate", [constant, cosine, waves])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
@pytest.mark.one_in(24)
def test_float64_is_close_by_sums_and_closer_step_by_step(
    rate: Callable[[int], float], epsilon: float, each_backend: Any, *, stepping: bool, bound: float
) -> None:
    table = Table(np.float64, stepping=stepping, epsilon=epsilon, backend=each_backend)
    exact = AllRows(np.float64, epsilon)
    for step, (rows, values) in enumerate(zipf_steps(10_000 if FULL else 470, seed=4), start=1):
        table.step(rows, values, step_size(rate, step))
        exact.step(rows, values, step_size(rate, step))
        if step % 233 == 0:
            assert distance(table.read(), exact.var) <= bound


GAPS = [0, 1, 255, 256, 257, 307, 308, 309]
GRADIENTS = [1.0, 1e-3, 1e-7, 1e-18, 0.0]


@pytest.mark.parametrize("stepping", [False, True])
def test_rows_catch_up_over_gaps(
    each_backend: Any, monkeypatch: pytest.MonkeyPatch, *, stepping: bool
) -> None:
    """The last gap is wider than the count has room: the table is brought up, and counts anew."""
    room, last = (1_024, 2_100) if FULL else (400, 450)
    monkeypatch.setattr(Factors, "room_for", lambda self, height: room)
    # A row of each gradient for each gap: it is named once, then after the gap, and read at the
    # end. The last row is named in all steps that name no other.
    gradients, gaps = (each.ravel() for each in np.meshgrid(GRADIENTS, GAPS))
    height = len(gaps) + 1
    table = Table(np.float32, stepping=stepping, epsilon=1e-5, height=height, backend=each_backend)
    exact = AllRows(np.float64, 1e-5, height=height)
    for step in range(1, last + 1):
        rows = np.flatnonzero((step == 1) | (gaps == step - 2))
        values = gradients[rows]
        if not rows.size:
            rows, values = np.array([height - 1]), np.ones(1)
        for each in (table, exact):
            each.step(rows, values[:, np.newaxis], step_size(constant, step))
        np.testing.assert_allclose(table.var[rows], exact.var[rows], rtol=2e-6, atol=1e-30)
    table.read()
    assert table.catch_up.now < last
    # GPUs flush products below 1.2e-38. So m no longer decays, by a tenth, from ten times this on,
    # and v, by a thousandth, from a thousand times this on.
    for mine, theirs in ((table.var, exact.var), (table.m, exact.m)):
        np.testing.assert_allclose(mine[:-1], theirs[:-1], rtol=4e-6, atol=1.2e-37)
    np.testing.assert_allclose(table.v[:-1], exact.v[:-1], rtol=8e-5, atol=1.2e-35)
