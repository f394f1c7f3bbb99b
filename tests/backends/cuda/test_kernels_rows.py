"""Copies of rows are numpy's, on the CPU and by the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from dtypes import DTYPES_BY_NAME
from emulator.emulator import EmulatorLauncher

from gpuopt.backends.backend import RowCopy
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.launch_shapes import COPY_CHUNK
from gpuopt.backends.cuda.row_copies import copy_rows as copy_by_kernel

pytestmark = [pytest.mark.value, pytest.mark.emulator]

SANITIZED = bool(os.environ.get("GPUOPT_EMULATOR_SANITIZE"))
TYPES = [*DTYPES_BY_NAME.values(), np.int8, np.int32, np.complex128]
# Of rows: those of 16 bytes, of a little more, one element, and longer than a chunk's words.
WIDTHS = [(), (4,), (3, 3), (1,)] + ([] if SANITIZED else [(COPY_CHUNK + 3,)])


@pytest.fixture(scope="module", autouse=True)
def kernel_is_compiled() -> None:
    EmulatorLauncher().prepare([kernels.copy_rows()])


def by_kernel(copies: Sequence[RowCopy]) -> None:
    launcher = EmulatorLauncher(seed=5)
    copy_by_kernel(launcher, copies)
    assert launcher.launches == 1


def numbered(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(dtype)


@pytest.mark.parametrize("copy", [CpuBackend().copy_rows, by_kernel])
def test_rows_of_all_types_and_widths_are_copied_at_once(copy: Callable[..., None]) -> None:
    from_rows, to_rows = np.int64([4, 0, 4]), np.int64([5, 1, 2])
    copies: list[RowCopy] = []
    expected: list[np.ndarray] = []
    for dtype in TYPES:
        for width in WIDTHS:
            source = numbered((5, *width), dtype)
            number = np.asarray(0.1).astype(dtype)[()]
            blank = numbered((6, *width), dtype)[::-1].copy()
            made = [blank.copy() for _ in range(5)]
            made[0] = source[from_rows]
            made[1][to_rows] = source[:3]
            made[2][to_rows] = source[from_rows]
            made[3][to_rows] = number
            made[4][...] = number
            targets = [blank[:3].copy(), *(blank.copy() for _ in range(4))]
            copies += [
                RowCopy(targets[0], source, from_rows),
                RowCopy(targets[1], source[:3], None, to_rows),
                RowCopy(targets[2], source, from_rows, to_rows),
                RowCopy(targets[3], number, None, to_rows),
                RowCopy(targets[4], number),
            ]
            expected += made
    copy(copies)
    for each, wanted in zip(copies, expected, strict=True):
        assert each.target.tobytes() == wanted.tobytes(), (wanted.dtype, wanted.shape)


@pytest.mark.parametrize("copy", [CpuBackend().copy_rows, by_kernel])
def test_parts_of_arrays_are_copied_to_any_address(copy: Callable[..., None]) -> None:
    memory = np.zeros(64, np.int8)
    source = numbered((40,), np.int8)
    copies = [
        RowCopy(memory[1:12].reshape(11, 1), source[3:14].reshape(11, 1)),
        RowCopy(memory[14:20].view(np.int16), source[2:8].view(np.int16)),
        RowCopy(memory[24:40].view(np.float32), source[8:24].view(np.float32)),
        RowCopy(memory[48:64].view(np.float32)[2:], np.float32(2)),
        RowCopy(np.zeros((2, 4), np.int32), np.arange(9, dtype=np.int32)[1:].reshape(2, 4)),
    ]
    expected = memory.copy()
    expected[1:12], expected[14:20], expected[24:40] = source[3:14], source[2:8], source[8:24]
    expected[56:64] = np.float32([2, 2]).view(np.int8)
    copy(copies)
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(copies[-1].target.ravel(), range(1, 9))


@pytest.mark.parametrize("copy", [CpuBackend().copy_rows, by_kernel])
def test_arrays_that_are_not_contiguous_and_empty_ones_are_copied(
    copy: Callable[..., None],
) -> None:
    adopted, source = np.zeros((4, 6))[:, ::2], numbered((8, 3), float)[::2]
    to, expected = np.zeros((2, 3)), source[[1, 2]].copy()
    rows = np.int64([3, 1])
    copies = [
        RowCopy(adopted, source[:2], None, rows),
        RowCopy(to, source, np.int64([1, 2])),
        RowCopy(np.zeros((3, 0)), np.zeros((3, 0))),
        RowCopy(np.zeros((3, 2)), np.float64(1), None, np.int64([])),
    ]
    copy(copies)
    np.testing.assert_array_equal(adopted[rows], source[:2])
    np.testing.assert_array_equal(to, expected)
    assert not copies[3].target.any()
