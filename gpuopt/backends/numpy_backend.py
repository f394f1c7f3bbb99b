"""Updates in host memory, by numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Literal

import numpy as np

from gpuopt.backends import host_memory
from gpuopt.backends.backend import RowFlags, Scalars, Target, Updated, compute_type
from gpuopt.backends.compiled_rule import compiled_rule
from gpuopt.backends.host_memory import scratch
from gpuopt.backends.host_plan import DensePlan, Kernel, chunk_length
from gpuopt.backends.recorded_rule import PlainRule, recorded_rule
from gpuopt.backends.row_sums import sort_rows, stable_order, sum_rows
from gpuopt.backends.workers import num_threads, share_out
from gpuopt.device import Device
from gpuopt.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# From here on, a second thread and a rule without temporaries are worth preparing.
_LARGE_ELEMENTS = 256 * 1024
_ELEMENTS_PER_THREAD = 128 * 1024
# Finding a row and bringing it costs several times what its arithmetic does.
_ROW_FACTOR = 4
_nothing = nullcontext()
_READWRITE: list[list[Literal["readwrite"]]] = [["readwrite"]]


class NumpyBackend:
    """The CPU's backend; see `Backend` for what each method promises."""

    xp: Any = np
    device = Device.cpu

    row_flags: RowFlags | None = None
    most_rows: int | None = None

    def active(self, *updated: Updated) -> AbstractContextManager[Any]:
        return _nothing

    def updating(self, *updated: Updated) -> AbstractContextManager[Any]:
        return _nothing

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        return _nothing

    def made(self, new: Updated) -> None:
        pass

    def as_array(self, value: Any) -> Array:
        return np.from_dlpack(value) if _is_foreign(value) else np.asarray(value)

    def are_here(self, arrays: Sequence[Any]) -> bool:
        return set(map(type, arrays)) == {np.ndarray}

    def plain_array(self, value: Any) -> Array | None:
        # Masked arrays have two memories.
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            return None
        return value.view(np.ndarray) if type(value) is not np.ndarray else value

    def layout(self, array: Array) -> Array:
        return array

    def full(self, shape: tuple[int, ...], dtype: np.dtype[Any], value: Any) -> Array:
        storage = host_memory.empty(shape, dtype)
        storage[...] = value
        return storage

    def to_host(self, array: Array) -> Array:
        return array.copy()

    def from_host(self, array: Array) -> Array:
        return array.copy()

    def from_peer(self, array: Array) -> Array:
        raise TypeError("the host is no GPU's peer")

    def plan_dense(self, targets: Sequence[Target], updated: Sequence[Updated] = ()) -> DensePlan:
        return DensePlan(targets)

    def apply_dense(
        self,
        rule: UpdateRule,
        plan: DensePlan,
        gradients: Sequence[Array],
        scalars: Scalars,
        *,
        token: object = None,
        refused: Any = None,
    ) -> None:
        _apply_plan(rule, plan, gradients, scalars)

    def apply_sparse(
        self,
        rule: UpdateRule,
        target: Target,
        values: Array,
        rows: Array,
        scalars: Scalars,
        *,
        touches_all_rows: bool,
        updated: Sequence[Updated] = (),
        refused: Any = None,
    ) -> None:
        if touches_all_rows:
            self._apply_to_all_rows(rule, target, values, rows, scalars)
        elif len(rows):
            _apply_to_touched_rows(rule, target, values, rows, scalars)

    def _apply_to_all_rows(
        self, rule: UpdateRule, target: Target, values: Array, rows: Array, scalars: Scalars
    ) -> None:
        sums, rows = self.sum_duplicate_rows(values, rows)
        written = [target.var, *target.slots]
        sums = _apart(sums, written)
        touched = [array[rows] for array in written]
        _apply_zero(rule, target, scalars)
        _apply_plan(rule, DensePlan([Target(touched[0], touched[1:])]), [sums], scalars)
        for array, new_rows in zip(written, touched, strict=True):
            array[rows] = new_rows

    def sum_duplicate_rows(self, values: Array, indices: Array) -> tuple[Array, Array]:
        values = values.astype(compute_type(values.dtype), copy=False)
        grouped = sort_rows(indices)
        if len(grouped.rows) == len(indices):
            return values, indices
        with np.errstate(all="ignore"):
            sums, order = sum_rows(values, grouped)
        by_appearance = stable_order(grouped.positions.take(grouped.starts.take(order)))
        rows = grouped.rows.take(order.take(by_appearance))
        return sums.take(by_appearance, axis=0), rows.astype(indices.dtype, copy=False)


def _is_foreign(value: Any) -> bool:
    """Whether this is another library's array, which shares its memory by DLPack."""
    return not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__dlpack__")


def _apply_plan(
    rule: UpdateRule, plan: DensePlan, gradients: Sequence[Array], scalars: Scalars
) -> None:
    threads = _threads_for(plan.size)
    kernel = _kernel(rule, plan.real, scalars, plan.size)
    gradients = plan.without_overlap(gradients)
    tasks, strided = plan.tasks(kernel, gradients, threads)
    share_out(lambda task: task(), tasks, threads)
    for target, gradient in strided:
        _walk(rule, target, gradient, scalars)


def _threads_for(size: int) -> int:
    return max(1, min(num_threads(), size // _ELEMENTS_PER_THREAD))


def _kernel(
    rule: UpdateRule, real: np.dtype[Any], scalars: Scalars, size: int, *, compiled: bool = True
) -> Kernel:
    if size < _LARGE_ELEMENTS:
        return PlainRule(rule, scalars)
    found = compiled_rule(rule, real, scalars) if compiled else None
    return found or recorded_rule(rule, real, scalars)


def _apply_to_touched_rows(
    rule: UpdateRule, target: Target, values: Array, rows: Array, scalars: Scalars
) -> None:
    written = [target.var, *target.slots]
    real = np.dtype(compute_type(values.dtype))
    grouped = sort_rows(rows)
    threads = _threads_for(values.size * _ROW_FACTOR)
    if values.size * _ROW_FACTOR >= _LARGE_ELEMENTS and all(
        array.flags.carray and array.dtype == real for array in written
    ):
        compiled = compiled_rule(rule, real, scalars)
        if compiled is not None:
            values = _apart(np.require(values, requirements=["C", "ALIGNED"]), written)
            height = -(-len(grouped.rows) // (4 * threads))
            share_out(
                lambda first: compiled.update_rows(
                    written, values, grouped, first, min(first + height, len(grouped.rows))
                ),
                range(0, len(grouped.rows), height),
                threads,
            )
            return
    values = values.astype(real, copy=False)
    if len(grouped.rows) == len(rows):
        sums = _apart(values, written)
    else:
        with np.errstate(all="ignore"):
            sums, order = sum_rows(values, grouped)
        rows = grouped.rows[order]
    row_size = max(sums[0].size, 1)
    kernel = _kernel(rule, real, scalars, sums.size * _ROW_FACTOR, compiled=False)
    threads = _threads_for(sums.size * 2)
    longest = chunk_length(kernel, sums.size, threads, len(written) * real.itemsize)
    height = max(longest // row_size, 1)

    def update_rows(first: int) -> None:
        part = slice(first, first + height)
        shape = sums[part].shape
        arrays = scratch([*[real] * len(written), *kernel.scratch_dtypes], math.prod(shape))
        for array, buffer in zip(written, arrays, strict=False):
            _take(array, rows[part], buffer.reshape(shape))
        kernel.apply(arrays[: len(written)], sums[part].reshape(-1), arrays[len(written) :])
        for array, buffer in zip(written, arrays, strict=False):
            _put(array, rows[part], buffer.reshape(shape))

    share_out(update_rows, range(0, len(rows), height), threads)


def _apart(values: Array, written: Sequence[Array]) -> Array:
    shared = any(np.may_share_memory(values, array) for array in written)
    return values.copy() if shared else values


def _take(array: Array, rows: Array, out: Array) -> None:
    if array.flags.carray and array.dtype == out.dtype and array.size:
        # mode="clip" skips a check, and with it a copy; rows are known to be within range.
        _whole_rows(array).take(rows, out=_whole_rows(out), mode="clip")
    else:
        out[...] = array[rows]


def _put(array: Array, rows: Array, values: Array) -> None:
    if array.flags.carray and array.dtype == values.dtype and array.size:
        _whole_rows(array)[rows] = _whole_rows(values)
    else:
        array[rows] = values


def _whole_rows(array: Array) -> Array:
    """Views each row as one element, which numpy moves faster."""
    return array.reshape(-1).view(_row_type(array.nbytes // len(array)))


@cache
def _row_type(size: int) -> np.dtype[np.void]:
    return np.dtype((np.void, size))


def _apply_zero(rule: UpdateRule, target: Target, scalars: Scalars) -> None:
    """Updates a whole table as if its gradient were zero."""
    var = target.var
    written = [var, *target.slots]
    real = np.dtype(compute_type(var.dtype))
    if var.size < _LARGE_ELEMENTS or not all(
        array.flags.carray and array.dtype == var.dtype for array in written
    ):
        _walk(rule, target, np.broadcast_to(var.dtype.type(0), var.shape), scalars)
        return
    kernel = compiled_rule(rule, real, scalars) or recorded_rule(
        rule, real, scalars, zero_grad=True
    )
    threads = _threads_for(var.size)
    tasks = DensePlan([target]).tasks_without_gradients(kernel, threads)
    share_out(lambda task: task(), tasks, threads)


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
