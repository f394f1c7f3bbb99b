"""Norms of arrays in host memory, by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.squares import sum_of_squares
from gpuopt.backends.norms import Clipping, may_be_reached
from gpuopt.fp_warnings import ignore_fp_warnings

Array = np.ndarray[Any, Any]


class CpuNorms:
    """See `Norms`."""

    def __init__(self, limits: CpuLimits) -> None:
        self._limits = limits

    def sum_squares(self, arrays: Sequence[Array]) -> Array:
        # Those of one type together, as the kernels do.
        total = np.float64(0)
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            same = [array for array in arrays if array.dtype == dtype]
            total += sum_of_squares(same, self._limits)
        return np.array([total])

    def norm(self, arrays: Sequence[Array], sums: Sequence[Array], dtype: Any) -> Any:
        return ignore_fp_warnings(_root, [self.sum_squares(arrays), *sums], np.dtype(dtype).type)

    def scale(
        self, arrays: Sequence[Array], norm: Any, most: np.floating[Any], clipping: Clipping
    ) -> list[Array]:
        return [ignore_fp_warnings(_scaled, array, norm, most, clipping) for array in arrays]


def _root(sums: Sequence[Array], real: Any) -> Any:
    # As much as TensorFlow's sum can hold: beyond it, a norm is infinite.
    return np.sqrt(real(np.sum(sums)))


def _scaled(array: Array, norm: Any, most: np.floating[Any], clipping: Clipping) -> Array:
    real: Any = compute_type(array.dtype)
    values, n, c = array.astype(real, copy=False), real(norm), real(most)
    one = real(1)
    if not may_be_reached(c):
        is_global = clipping is Clipping.GLOBAL_NORM
        scaled = values * (one + (n - n) if is_global else np.minimum(one, c / n))
    elif clipping is Clipping.GLOBAL_NORM:
        scaled = values * (c * np.minimum(one / n, one / c) + (n - n))
    elif clipping is Clipping.NORM:
        scaled = values * c / np.maximum(n, c)
    else:
        scaled = values * c * np.minimum(one / n * real(array.size), one / c)
    return np.asarray(scaled).astype(array.dtype, copy=False)
