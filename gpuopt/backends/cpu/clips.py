"""Norms in host memory: of arrays, and of a step's gradients, with the factors that clip them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.backends.clips import (
    FACTOR_OF_FLOAT32,
    FACTOR_OF_FLOAT64,
    ClipForm,
    ClipLimits,
    DenseGradients,
    RuleInputs,
    SparseGradient,
)
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.sparse_update import sum_duplicate_rows
from gpuopt.backends.cpu.squares import sum_of_squares
from gpuopt.backends.loss_scaling import Decision
from gpuopt.backends.norms import Clipping, may_be_reached
from gpuopt.backends.record import StepRecord
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.update_rule import UpdateRule

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


class CpuClips:
    """See `Clips`."""

    def __init__(self, limits: CpuLimits) -> None:
        self._limits = limits

    def inputs(self, rule: UpdateRule, plan: Any, bounds: Sequence[float]) -> RuleInputs | None:
        return None

    def sums(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        num_norms: int,
        refused: Any = None,
        *,
        decides: bool = False,
    ) -> Array:
        sums = np.zeros(num_norms)
        for gradients in dense:
            for norm, positions in gradients.positions().items():
                mine = [gradients.arrays[position] for position in positions]
                sums[norm] += sum_of_squares(mine, self._limits, is_wide=True)
        for each in sparse:
            summed, _ = sum_duplicate_rows(each.values, each.rows, self._limits)
            sums[each.norm] += sum_of_squares([summed], self._limits, is_wide=True)
        return sums

    def measure(
        self,
        dense: Sequence[DenseGradients],
        sparse: Sequence[SparseGradient],
        limits: ClipLimits,
        refused: Any = None,
        decision: Decision | None = None,
    ) -> StepRecord:
        return self.join([self.sums(dense, sparse, len(limits.most))], limits)

    def join(
        self, sums: Sequence[Array], limits: ClipLimits, decision: Decision | None = None
    ) -> StepRecord:
        return StepRecord(factors=ignore_fp_warnings(_factors, sums, limits))

    def memory(self, record: StepRecord) -> Any:
        return record.factors

    def take(self, record: StepRecord, memory: Any) -> StepRecord:
        return StepRecord(factors=memory)

    def factor_scalar(
        self, factors: Array, norm: int, real: type[np.floating[Any]]
    ) -> np.floating[Any]:
        if norm < 0:
            return real(1)
        column = FACTOR_OF_FLOAT64 if real is np.float64 else FACTOR_OF_FLOAT32
        return real(factors[norm, column])


def _factors(sums: Sequence[Array], limits: ClipLimits) -> Array:
    rows = []
    unscale = np.float64(limits.unscale)
    for scaled, most in zip(np.sum(sums, axis=0), limits.most, strict=True):
        squares = scaled * unscale * unscale / limits.num_copies
        # As much as TensorFlow's sum can hold: beyond it, a norm is infinite.
        norm = np.sqrt(squares) if limits.is_double else np.sqrt(np.float32(squares))
        factor = _factor(np.float64, norm, most, limits.form)
        of_float32 = _factor(np.float32, norm, most, limits.form)
        if np.isfinite(norm) and np.isinf(np.float32(norm)):
            # A norm of float64 may be more than float32 holds. Kernels flush subnormal numbers.
            of_float32 = np.float32(factor if factor >= np.finfo(np.float32).tiny else 0)
        rows.append([squares, norm, of_float32, factor, unscale])
    return np.array(rows, np.float64)


def _factor(real: Any, norm: Any, most: Any, form: ClipForm) -> Any:
    n, c, one = real(norm), real(most), real(1)
    if np.isinf(c):
        return one
    if form is ClipForm.TENSORFLOW:
        return (c * np.minimum(one / n, one / c) if may_be_reached(c) else one) + (n - n)
    if form is ClipForm.TORCH:
        return np.minimum(c / (n + real(1e-6)), one)
    return one / (n / c) if n > c else one
