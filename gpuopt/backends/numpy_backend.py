"""Updates in host memory, by numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gpuopt.backends import host_memory
from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.host_plan import DensePlan, Kernel, chunk_length, cut, update_chunk
from gpuopt.backends.recorded_rule import PlainRule, RecordedRule
from gpuopt.backends.host_memory import scratch
from gpuopt.backends.row_sums import sort_rows, sum_rows
from gpuopt.backends.workers import num_threads, share_out
from gpuopt.device import Device
from gpuopt.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# From here on, a second thread and a rule without temporaries are worth preparing.
_LARGE_ELEMENTS = 256 * 1024
_ELEMENTS_PER_THREAD = 128 * 1024
_READWRITE: list[list[Literal["readwrite"]]] = [["readwrite"]]


class NumpyBackend:
    """The CPU's backend; see `Backend` for what each method promises."""

    xp: Any = np
    device = Device.cpu

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        storage = host_memory.empty(shape, dtype)
        storage[...] = value
        return storage

    def to_host(self, array: Array) -> Array:
        return array.copy()

    def plan_dense(self, targets: Sequence[Target]) -> DensePlan:
        return DensePlan(targets)

    def apply_dense(
        self, rule: UpdateRule, plan: DensePlan, gradients: Sequence[Array], scalars: Scalars
    ) -> None:
        threads = _threads_for(plan.size)
        kernel = _kernel(rule, plan.real, scalars, plan.size)
        gradients = plan.without_overlap(gradients)
        tasks, strided = plan.tasks(kernel, gradients, threads)
        share_out(lambda task: task(), tasks, threads)
        for target, gradient in strided:
            _walk(rule, target, gradient, scalars)

    def apply_sparse(
        self,
        rule: UpdateRule,
        target: Target,
        values: Array,
        rows: Array,
        scalars: Scalars,
        *,
        touches_all_rows: bool,
    ) -> None:
        if not len(rows) and not touches_all_rows:
            return
        written = [target.var, *target.slots]
        real = np.dtype(compute_type(values.dtype))
        grouped = sort_rows(rows)
        with np.errstate(all="ignore"):
            sums, order = sum_rows(values.astype(real, copy=False), grouped)
        rows = grouped.rows[order]
        touched = written
        if touches_all_rows:
            touched = [array[rows] for array in written]
            _apply_zero(rule, target, scalars)

        kernel = _kernel(rule, real, scalars, sums.size)
        threads = _threads_for(sums.size)
        row_size = max(sums[:1].size, 1)
        bytes_per_element = (1 + len(target.slots)) * real.itemsize
        height = max(chunk_length(kernel, sums.size, threads, bytes_per_element) // row_size, 1)

        def update_rows(start: int) -> None:
            part = slice(start, start + height)
            shape = sums[part].shape
            arrays = scratch(
                [*[real] * len(written), *kernel.scratch_dtypes], math.prod(shape)
            )
            for array, buffer in zip(touched, arrays, strict=False):
                if touches_all_rows:
                    np.copyto(buffer.reshape(shape), array[part])
                else:
                    _take(array, rows[part], buffer.reshape(shape))
            kernel.apply(
                arrays[: len(written)], sums[part].reshape(-1), arrays[len(written) :]
            )
            for array, buffer in zip(written, arrays, strict=False):
                array[rows[part]] = buffer.reshape(shape)

        share_out(update_rows, range(0, len(rows), height), threads)

    def sum_duplicate_rows(self, values: Array, indices: Array) -> tuple[Array, Array]:
        values = values.astype(compute_type(values.dtype), copy=False)
        grouped = sort_rows(indices)
        if len(grouped.rows) == len(indices):
            return values, indices
        with np.errstate(all="ignore"):
            sums, order = sum_rows(values, grouped)
        by_appearance = np.argsort(grouped.positions[grouped.starts[order]])
        rows = grouped.rows[order[by_appearance]]
        return sums[by_appearance], rows.astype(indices.dtype, copy=False)


def _threads_for(size: int) -> int:
    return max(1, min(num_threads(), size // _ELEMENTS_PER_THREAD))


def _kernel(rule: UpdateRule, real: np.dtype[Any], scalars: Scalars, size: int) -> Kernel:
    return RecordedRule(rule, real, scalars) if size >= _LARGE_ELEMENTS else PlainRule(rule, scalars)


def _take(array: Array, rows: Array, out: Array) -> None:
    if array.flags.carray and array.dtype == out.dtype:
        # mode="clip" skips a check, and with it a copy; rows are known to be within range.
        array.take(rows, axis=0, out=out, mode="clip")
    else:
        out[...] = array[rows]


def _apply_zero(rule: UpdateRule, target: Target, scalars: Scalars) -> None:
    """Updates a whole table as if its gradient were zero."""
    var = target.var
    written = [var, *target.slots]
    real = np.dtype(compute_type(var.dtype))
    if var.size < _LARGE_ELEMENTS or not all(array.flags.carray for array in written):
        _walk(rule, target, np.broadcast_to(var.dtype.type(0), var.shape), scalars)
        return
    kernel = RecordedRule(rule, real, scalars, zero_grad=True)
    threads = _threads_for(var.size)
    bytes_per_element = 0 if var.dtype == real else len(written) * real.itemsize
    longest = chunk_length(kernel, var.size, threads, bytes_per_element)
    share_out(
        lambda chunks: update_chunk(kernel, real, chunks, None),
        cut([array.reshape(-1) for array in written], longest),
        threads,
    )


def _walk(rule: UpdateRule, target: Target, gradient: Array, scalars: Scalars) -> None:
    """Updates a variable of any strides, in flat chunks of the compute type.

    nditer copies a chunk in and out only where the storage is of another type or not contiguous.
    """
    var, slots = target
    real = compute_type(var.dtype)
    chunks = np.nditer(
        [var, gradient, *slots],
        flags=["external_loop", "buffered", "zerosize_ok", "copy_if_overlap"],
        op_flags=[["readwrite"], ["readonly"], *_READWRITE * len(slots)],
        op_dtypes=[real] * (2 + len(slots)),
        casting="unsafe",
        buffersize=PlainRule.most_elements,
    )
    # NaN and infinity pass through in silence, as on a GPU and in TensorFlow.
    with np.errstate(all="ignore"), chunks:
        for chunk in chunks:
            rule.apply(*chunk, **scalars)
