"""The kernels of norms compute what numpy computes, within the arrays that they are given."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME, TYPES_OF_KERNELS
from emulator.emulator import EmulatorLauncher

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.clips import CpuNorms
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import CLIP_CHUNK
from gpuopt.backends.cuda.norms import CudaNorms
from gpuopt.backends.norms import Clipping

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
# Under a sanitizer, every element costs a lot: less of everything, and what differs in kind.
ORDERS = [7] if SANITIZED else [0, 1, 7]
CLIPPINGS = [Clipping.GLOBAL_NORM] if SANITIZED else list(Clipping)
SIZES = [1, 7, 64, 0, 1001, CLIP_CHUNK + 1]
if not SANITIZED:
    SIZES += [CLIP_CHUNK, 2 * CLIP_CHUNK - 5]


@pytest.fixture(scope="module", autouse=True)
def kernels_are_compiled() -> None:
    EmulatorLauncher().prepare(
        [
            *(kernels.add_squares(real) for real in ("float32", "float64")),
            *(kernels.sum_squares(dtype) for dtype in TYPES_OF_KERNELS),
            *(kernels.scale_to_norm(dtype) for dtype in TYPES_OF_KERNELS),
        ]
    )


def arrays_of(dtype: Any) -> list[np.ndarray]:
    """Arrays of many sizes, each alone in its memory, and one that is not at a pack's address."""
    rng = np.random.default_rng(4)
    arrays = [rng.normal(size=size).astype(dtype) for size in SIZES]
    return [*arrays, rng.normal(size=502).astype(dtype)[1:], arrays[4][::-2]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", TYPES_OF_KERNELS)
def test_norms_and_what_they_scale_are_numpys(dtype: str, clipping: Clipping, order: int) -> None:
    launcher = EmulatorLauncher(seed=order)
    norms = CudaNorms(launcher)
    arrays = arrays_of(DTYPES_BY_NAME[dtype])
    before = [array.copy() for array in arrays]
    real = compute_type(arrays[0].dtype)
    more = [np.float64([25.0])]
    norm = norms.norm(arrays, more, real)
    expected = CpuNorms(CpuLimits()).norm(arrays, more, real)
    np.testing.assert_allclose(norm, expected, rtol=8 * np.finfo(real).eps)
    scaled = norms.scale(arrays, norm, real(3), clipping)
    assert launcher.launches == 3
    eps = float(ml_dtypes.finfo(arrays[0].dtype).eps)
    exact = CpuNorms(CpuLimits()).scale(arrays, expected, real(3), clipping)
    for got, each, array, old in zip(scaled, exact, arrays, before, strict=True):
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_allclose(np.float64(got), np.float64(each), rtol=16 * eps, atol=1e-7)
        assert array.tobytes() == old.tobytes()


@pytest.mark.parametrize("most", [0.0, 2.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0], ids=str)
def test_numbers_that_are_not_finite_go_where_numpys_go(bad: float, most: float) -> None:
    arrays = [np.float32([bad, 0, -bad]), np.float32([0] if bad == 0 else [-1])]
    norms, host = CudaNorms(EmulatorLauncher()), CpuNorms(CpuLimits())
    for clipping in Clipping:
        got = norms.scale(arrays, norms.norm(arrays, (), np.float32), np.float32(most), clipping)
        norm = host.norm(arrays, (), np.float32)
        expected = host.scale(arrays, norm, np.float32(most), clipping)
        for mine, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_sums_have_the_same_bits_in_every_order_at_any_address_on_any_gpu() -> None:
    rng = np.random.default_rng(5)
    size = CLIP_CHUNK + 9 if SANITIZED else 3 * CLIP_CHUNK
    memory = rng.normal(size=size).astype(np.float32)
    sums = set()
    for order, shift, multiprocessors in ((0, 0, 4), (3, 1, 4), (7, 2, 1)):
        launcher = EmulatorLauncher(seed=order)
        launcher.num_multiprocessors = multiprocessors
        copy = np.zeros(memory.size + 4, np.float32)[shift : shift + memory.size]
        copy[...] = memory
        sums.add(CudaNorms(launcher).sum_squares([copy, copy[:100]]).tobytes())
    assert len(sums) == 1


def test_types_are_summed_together() -> None:
    arrays = [np.float32([3]), np.float16([4, 0, 12]), np.float64([84])]
    launcher = EmulatorLauncher()
    assert CudaNorms(launcher).norm(arrays, (), np.float64) == 85
    assert launcher.launches == 4
    assert CudaNorms(launcher).norm([], (), np.float32) == 0


@pytest.mark.skipif(SANITIZED, reason="under a sanitizer it takes minutes")
def test_the_norm_of_ten_million_elements_is_as_near_as_is_promised() -> None:
    gradient = np.random.default_rng(0).standard_normal(10**7, np.float32)
    wide = gradient.astype(np.float64)
    exact = float(np.sqrt(np.dot(wide, wide)))
    got = float(CudaNorms(EmulatorLauncher()).norm([gradient], (), np.float32))
    # As docs/guides/schedules_and_clipping.md says, for any number of elements.
    assert abs(got - exact) <= 16 * float(np.spacing(np.float32(exact)))
    assert got == float(CpuNorms(CpuLimits()).norm([gradient], (), np.float32))
