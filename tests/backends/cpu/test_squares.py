"""Sums of squares in host memory: compiled and by numpy they have the same bits, and are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES, every_dtype

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.squares import CHUNK, sum_of_squares

pytestmark = pytest.mark.value

NUMPY, COMPILED = CpuLimits(large_elements=10**18), CpuLimits(large_elements=1)
SIZES = (1, 5, 255, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 0, 3 * CHUNK + 77, 270 * CHUNK)


@pytest.mark.cxx
@pytest.mark.parametrize("threads", ["1", "3"])
@every_dtype
def test_compiled_sums_have_numpys_bits(
    dtype: Any, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUOPT_THREADS", threads)
    rng = np.random.default_rng(7)
    arrays = [rng.normal(size=size).astype(dtype) for size in SIZES]
    arrays += [arrays[-1][1:], arrays[-1].reshape(-1, 8)[:, ::3]]
    got = sum_of_squares(arrays, COMPILED)
    assert got == sum_of_squares(arrays, NUMPY)
    assert got.dtype == np.float64
    assert sum_of_squares([], COMPILED) == sum_of_squares([], NUMPY) == 0


def worst_of(dtype: np.dtype[Any], size: int) -> np.ndarray:
    """Numbers whose additions round most: of many sizes, and with all digits."""
    rng = np.random.default_rng(8)
    return (rng.uniform(1, 2, size) * 2.0 ** rng.integers(-6, 7, size)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("make", [worst_of, lambda dtype, size: np.full(size, 1.1, dtype)])
def test_a_norm_of_ten_million_is_within_its_bound(make: Any, dtype: Any) -> None:
    """A sum's error is at most that of its 27 roundings one after the other, its root's half."""
    array = make(dtype, 10**7)
    exact = np.sqrt(np.sum(array.astype(np.longdouble) ** 2))
    norm = np.sqrt(np.longdouble(sum_of_squares([array], NUMPY)))
    depth = 1 + CHUNK // 256 // (16 // array.itemsize) + 2 + 8
    if dtype == np.float64:  # chunks are added up in the same type
        depth += 10**7 // CHUNK // 256 + 8
    bound = depth / 2 * float(np.finfo(compute_type(array.dtype)).eps) / 2
    assert abs(float((norm - exact) / exact)) <= bound
    assert bound <= 20 * float(np.finfo(dtype).eps)


def test_squares_that_are_more_than_a_type_holds_are_infinite() -> None:
    for limits in (NUMPY, COMPILED):
        assert sum_of_squares([np.float32([1e30])], limits) == np.inf
        assert np.isnan(sum_of_squares([np.float32([np.nan, 1])], limits))
        np.testing.assert_allclose(sum_of_squares([np.float64([1e30])], limits), 1e60, rtol=1e-15)


@pytest.mark.cxx
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_wide_sums_are_those_of_smaller_numbers(dtype: Any) -> None:
    rng = np.random.default_rng(9)
    array = rng.normal(size=2 * CHUNK + 5).astype(dtype)
    array[2 * CHUNK :] *= dtype.type(2.0**-60)  # a chunk whose sum a float holds
    large = array * dtype.type(2.0**90)
    for limits in (NUMPY, COMPILED):
        chunks = [sum_of_squares([each], limits, is_wide=True) for each in (large, large[CHUNK:])]
        exact = [sum_of_squares([each], limits) for each in (array, array[CHUNK:])]
        assert chunks == [each * 2.0**180 for each in exact]
        assert sum_of_squares([large], limits) == np.inf
    for bad in (np.inf, np.nan):
        large[3] = bad
        np.testing.assert_equal(sum_of_squares([large], NUMPY, is_wide=True), np.float64(bad))
