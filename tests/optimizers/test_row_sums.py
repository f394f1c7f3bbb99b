"""Rows that a sparse gradient repeats are summed in the documented order on every device."""

from __future__ import annotations

from typing import Any

import numpy as np
from dtypes import every_dtype
from each_device import variable_on
from row_sums import sums_of_rows

import gpuopt
from gpuopt import IndexedSlices

HEIGHT = 40
WIDTHS = (3, 1, 3, 3)


def gradients(rng: np.random.Generator, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Some for each table: one row goes on over a stretch, and -0 stays what it is."""
    given = []
    for width in WIDTHS:
        rows = np.where(rng.random(700) < 0.8, 7, rng.integers(0, HEIGHT, 700)).astype(np.int32)
        values = (rng.normal(size=(700, width)) * 2.0 ** rng.integers(-8, 8, (700, 1))).astype(
            dtype
        )
        values[rows == 5] = -0.0
        given.append((values, rows))
    return given


@every_dtype
def test_a_step_of_several_tables_adds_rows_in_one_order(dtype: Any, xp: Any) -> None:
    given = gradients(np.random.default_rng(0), dtype)
    tables = [variable_on(xp, np.full((HEIGHT, width), -0.0, dtype)) for width in WIDTHS]
    pairs = [
        (IndexedSlices(xp.asarray(values), xp.asarray(rows)), table)
        for (values, rows), table in zip(given, tables, strict=True)
    ]
    gpuopt.GradientDescentOptimizer(-1.0).apply_gradients(pairs)
    before = dict.fromkeys(WIDTHS, 0)
    for (values, rows), table, width in zip(given, tables, WIDTHS, strict=True):
        real = values.astype(np.float64 if dtype == np.float64 else np.float32)
        want = np.full((HEIGHT, width), -0.0, real.dtype)
        for row, total in sums_of_rows(real, rows, before[width]).items():
            want[row] = total
        before[width] += len(rows)
        # Those of one width are sorted together.
        assert table.numpy().tobytes() == want.astype(dtype).tobytes()
