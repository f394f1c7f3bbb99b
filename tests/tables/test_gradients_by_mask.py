"""A mask of rows makes the same gradient as the rows' numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dtypes import every_dtype

import gpuopt
from gpuopt import IndexedSlices, Variable


@every_dtype
@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("device", ["cpu", "gpu:0"])
@pytest.mark.parametrize("mask", [[True, False, True, True], [False] * 4, [True] * 4], ids=str)
def test_a_mask_chooses_rows_of_a_dense_gradient(mask: Any, device: str, dtype: Any) -> None:
    values = np.arange(8).reshape(4, 2).astype(dtype)
    tables = [Variable(np.zeros((4, 2), dtype), device=device) for _ in range(2)]
    optimizers = [gpuopt.LazyAdamOptimizer(0.1) for _ in range(2)]
    rows = np.flatnonzero(mask)
    on_device = Variable(values, device=device)
    given = [on_device.value(), on_device, values if device == "cpu" else on_device]
    masks = [mask, np.array(mask), Variable(np.array(mask), device=device)]
    for value, chosen in zip(given, masks, strict=True):
        gradient = IndexedSlices.from_mask(value, chosen)
        assert gradient.dense_shape == (4, 2)
        assert gradient.device == tables[0].device
        optimizers[0].apply_gradients([(gradient, tables[0])])
        optimizers[1].apply_gradients([(IndexedSlices(values[rows], rows), tables[1])])
    np.testing.assert_array_equal(tables[0].numpy(), tables[1].numpy())


def test_its_rows_are_copies_in_ascending_order() -> None:
    values, mask = np.arange(6.0), np.array([True, False] * 3)
    gradient = IndexedSlices.from_mask(values, mask)
    values[:], mask[:] = -1, False
    np.testing.assert_array_equal(gradient.values, [0, 2, 4])
    np.testing.assert_array_equal(gradient.indices, [0, 2, 4])


@pytest.mark.parametrize(
    ("values", "mask", "error", "match"),
    [
        (
            np.zeros((1, 2)),
            [True, False],
            ValueError,
            "values of shape .1, 2. for a mask of 2 rows",
        ),
        (np.zeros((3, 2)), [1, 0, 1], TypeError, "must be bool, got int64; for the numbers of row"),
        (np.zeros((2, 2)), [[True, False]] * 2, ValueError, r"a vector, got shape \(2, 2\)"),
        (1.0, [True], ValueError, r"values of shape \(\)"),
        (None, [True], TypeError, "takes a gradient of all rows, as an array; got None"),
        (IndexedSlices([1.0], [0]), [True], TypeError, "IndexedSlices, which name their rows"),
        (["a"], [True], TypeError, "values must be numbers"),
        (np.ma.zeros(1), [True], TypeError, "masked"),
        (np.zeros(1), np.ma.array([True]), TypeError, "masked"),
    ],
    ids=str,
)
def test_what_is_no_gradient_of_all_rows_is_refused(
    values: Any, mask: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        IndexedSlices.from_mask(values, mask)


def test_a_gradient_of_another_number_of_rows_is_refused() -> None:
    table = Variable(np.zeros((3, 2)), name="table")
    gradient = IndexedSlices.from_mask(np.zeros((4, 2)), [True, False, False, False])
    with pytest.raises(ValueError, match=r'"table" has dense_shape \(4, 2\); .* shape \(3, 2\)'):
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(gradient, table)])
