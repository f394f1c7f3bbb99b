"""Sparse updates in host memory: repeated rows are summed, and the rule is applied to the sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.catch_up import (
    CHUNK_ELEMENTS,
    UpToDate,
    bring_up_some,
    count_step,
    numbers_of,
)
from gpuopt.backends.cpu.chunks import chunk_length
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.dense_update import update_dense
from gpuopt.backends.cpu.forms.compiled import (
    MOST_ROWS,
    RowUpdate,
    compiled_groups,
    compiled_rows,
)
from gpuopt.backends.cpu.forms.compiled_catch_up import compiled_catch_up
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.replayed import replayed_rules
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import scratch
from gpuopt.backends.cpu.row_groups import RowGroups, group_rows, stable_order, sum_rows
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.tiles import Rounding, buffers_for, cut_short, update_tile
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.accumulation import place_sum
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# Loading a row from a random place in memory costs several times as much as its arithmetic.
ROW_FACTOR = 4


def update_all_rows(
    rule: UpdateRule,
    other_rows: UpdateRule,
    plan: DensePlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
    first: int,
) -> None:
    """Updates a whole table; rows without a gradient by `other_rows` and a gradient of zero.

    `first` is that of `group_rows`.
    """
    sums, rows = sum_duplicate_rows(values, rows, limits, first)
    [arrays] = plan.arrays
    if rule is other_rows and plan.size < limits.compiled_elements:
        gradient = np.zeros(arrays[0].shape, plan.real)
        gradient[rows] = sums
        update_dense(rule, plan, [gradient], [scalars], limits)
        return
    others = [other_rows.own(scalars)]
    if _are_few(sums, limits) and sums.size:
        new_rows = _new_rows(rule, plan, sums, rows, scalars)
        update_dense(other_rows, plan, None, others, limits)
        _write_rows(arrays, rows, new_rows)
        return
    sums = _copied_if_shared(sums, arrays)
    old_rows = [array[rows] for array in arrays]
    update_dense(other_rows, plan, None, others, limits)
    _write_rows(arrays, rows, old_rows)
    if sums.size:
        update_touched_rows(rule, plan, sums, rows, scalars, limits, 0)


def update_late_rows(
    rule: UpdateRule,
    plan: DensePlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    catch_up: CatchUp,
    limits: CpuLimits,
    first: int,
) -> None:
    """Updates those rows of a table that have a gradient, after the steps that they have missed.

    `first` is that of `group_rows`.
    """
    if values.size:
        rows = update_touched_rows(rule, plan, values, rows, scalars, limits, first, catch_up)
    count_step(catch_up, rows, scalars)


def update_touched_rows(
    rule: UpdateRule,
    plan: DensePlan,
    values: Array,
    rows: Array,
    scalars: Scalars,
    limits: CpuLimits,
    first: int,
    catch_up: CatchUp | None = None,
) -> Array:
    """Updates those rows of a table that have a gradient; at least one has.

    With `catch_up`, these rows make the steps first that they have missed. `first` is that of
    `group_rows`.

    Returns:
        The rows, each once.
    """
    [arrays], codecs, real = plan.arrays, plan.codecs, plan.real
    row_update: RowUpdate | None = None
    first_number = plan.targets[0].first_number
    if catch_up is None:
        is_compiled = plan.is_compiled(rule, values.size * ROW_FACTOR)
    else:  # missed steps have powers, which numpy computes otherwise
        is_compiled = not _are_few(values, limits)
    if is_compiled and not plan.strided:
        threads = limits.threads_for(values.size * ROW_FACTOR)
        compiled = plan.compiled_rows(rule) if catch_up is None else None
        if compiled is not None and threads == 1 and len(rows) <= MOST_ROWS:
            values, width = plan.memory.apart(values, plan.real), values[0].size
            compiled.update_table(plan.addresses, width, first_number, values, rows, scalars, first)
            return rows
        if compiled is not None:
            row_update = partial(compiled.row_update, first_number, scalars)
        elif catch_up is not None:
            late = compiled_catch_up(rule, catch_up, codecs, real)
            own = np.array([scalars[name] for name in rule.scalars], real)
            row_update = None if late is None else partial(late.row_update, own, first_number)
        if row_update is not None:
            values = plan.memory.apart(values, plan.real)
            grouped = compiled_groups(rows, first)
            _update_compiled(row_update, arrays, values, grouped, threads)
            return grouped.rows
    values = values.astype(real, copy=False)
    groups = group_rows(rows, first)
    if len(groups.rows) == len(rows):
        sums = _copied_if_shared(values, arrays)
    else:
        sums, order = ignore_fp_warnings(lambda: sum_rows(values, groups))
        rows = groups.rows[order]
    if catch_up is None and _are_few(sums, limits):
        _write_rows(arrays, rows, _new_rows(rule, plan, sums, rows, scalars))
        return rows
    form: RuleForm
    if rule.row_slots or sums.size * ROW_FACTOR < limits.large_elements:
        form = PlainRule(rule, scalars)
    else:
        [form] = replayed_rules(rule, real, [scalars])
    if catch_up is None:
        rounding = Rounding(rule.is_averaged, scalars) if rule.is_rounded else None
        _update_gathered(form, plan, sums, rows, limits, rounding)
    else:
        _update_late(form, rule, plan, sums, rows, scalars, catch_up, limits)
    return rows


def _are_few(values: Array, limits: CpuLimits) -> bool:
    """Whether these rows are too few for compiled code: numpy updates them in one piece."""
    return values.size * ROW_FACTOR < limits.compiled_elements


def _new_rows(
    rule: UpdateRule, plan: DensePlan, sums: Array, rows: Array, scalars: Scalars
) -> list[Array]:
    """Returns the updated rows of a table's arrays, and leaves the table as it is."""
    [arrays], codecs, real = plan.arrays, plan.codecs, plan.real
    height = len(rows)
    new_rows = [np.ascontiguousarray(array[rows]).reshape(height, -1) for array in arrays]
    form, numbers = PlainRule(rule, scalars), numbers_of(plan, rows)
    rounding = Rounding(rule.is_averaged, scalars) if rule.is_rounded else None
    buffers = [np.empty(sums.size, dtype) for dtype in buffers_for(form, codecs, real, None)]
    update_tile(form, codecs, real, new_rows, sums.reshape(-1), buffers, numbers, rounding)
    return new_rows


def _write_rows(arrays: Sequence[Array], rows: Array, new_rows: Sequence[Array]) -> None:
    for array, new in zip(arrays, new_rows, strict=True):
        array[rows] = new.reshape(len(rows), *array.shape[1:])


def sum_duplicate_rows(
    values: Array, indices: Array, limits: CpuLimits, first: int = 0
) -> tuple[Array, Array]:
    """Adds up rows that share an index; see `Backend.sum_duplicate_rows`, and `group_rows`."""
    real_type = compute_type(values.dtype)
    real = np.dtype(real_type)
    values = values.astype(real, copy=False)
    compiled = None
    if not _are_few(values, limits):
        compiled = compiled_rows(place_sum, real)
    if compiled is not None:
        groups = compiled_groups(indices, first)
        if len(groups.rows) == len(indices):
            return values, indices
        sums = np.empty((len(groups.rows), *values.shape[1:]), real)
        values = np.require(values, requirements=["C", "ALIGNED"])
        in_order = groups._replace(rows=np.arange(len(groups.rows)))
        threads = limits.threads_for(values.size * ROW_FACTOR)
        row_update = partial(compiled.row_update, 0, {"zero": real_type(-0.0)})
        _update_compiled(row_update, [sums], values, in_order, threads)
        return sums, groups.rows.astype(indices.dtype, copy=False)
    groups = group_rows(indices, first)
    if len(groups.rows) == len(indices):
        return values, indices
    sums, order = ignore_fp_warnings(lambda: sum_rows(values, groups))
    by_appearance = stable_order(groups.positions.take(groups.begins.take(order)))
    rows = groups.rows.take(order.take(by_appearance))
    return sums.take(by_appearance, axis=0), rows.astype(indices.dtype, copy=False)


def _update_compiled(
    row_update: RowUpdate,
    written: Sequence[Array],
    values: Array,
    groups: RowGroups,
    threads: int,
) -> None:
    """Adds up each row's values and updates the row, in one pass.

    `written` are arrays [height, ...], and `values` [num_rows, ...], contiguous, in other memory.
    """
    update, num_rows = row_update(written, values, groups), len(groups.rows)
    # Threads that share the rows end at about the same time; one alone makes one call.
    height = -(-num_rows // (4 * threads)) if threads > 1 else num_rows
    share_out(
        lambda first: update(first, min(first + height, num_rows)),
        range(0, num_rows, height),
        threads,
    )


def _update_gathered(
    form: RuleForm,
    plan: DensePlan,
    sums: Array,
    rows: Array,
    limits: CpuLimits,
    rounding: Rounding | None,
) -> None:
    """Copies rows into scratch arrays, updates them there, and copies them back."""
    [arrays], codecs, real = plan.arrays, plan.codecs, plan.real
    types = [*(array.dtype for array in arrays), *buffers_for(form, codecs, real, None)]
    threads = limits.threads_for(sums.size * 2)
    gathered_bytes = sum(each.itemsize for each in types[: len(arrays) + codecs.num_decoded])
    longest = chunk_length(form, sums.size, threads, gathered_bytes)
    width = max(sums[0].size, 1)
    height = max(cut_short(longest, codecs, is_rounded=rounding is not None) // width, 1)

    def update_rows(first: int) -> None:
        some, gradient = rows[first : first + height], sums[first : first + height]
        buffers = scratch(types, gradient.size)
        gathered = []
        for array, buffer in zip(arrays, buffers, strict=False):
            shape = len(some), math.prod(array.shape[1:])
            gathered.append(buffer[: math.prod(shape)].reshape(shape))
            _take(array, some, gathered[-1])
        grad, own, numbers = gradient.reshape(-1), buffers[len(arrays) :], numbers_of(plan, some)
        update_tile(form, codecs, real, gathered, grad, own, numbers, rounding)
        for array, new_rows in zip(arrays, gathered, strict=True):
            _put(array, some, new_rows)

    share_out(update_rows, range(0, len(rows), height), threads)


def _update_late(
    form: RuleForm,
    rule: UpdateRule,
    plan: DensePlan,
    sums: Array,
    rows: Array,
    scalars: Scalars,
    catch_up: CatchUp,
    limits: CpuLimits,
) -> None:
    """Does what `_update_gathered` does, after the steps that the rows have missed."""
    threads = limits.threads_for(sums.size * 2)
    longest = min(chunk_length(form, sums.size, threads), CHUNK_ELEMENTS)
    height = max(longest // max(sums[0].size, 1), 1)
    shift, is_rounded = rule.shift, rule.is_rounded
    decay = None if shift is None or shift.decay is None else scalars[shift.decay]

    def update_rows(first: int) -> None:
        part = slice(first, first + height)
        gradient = sums[part].reshape(-1)

        def step(caught_up: UpToDate) -> None:
            var, *slots = (array.reshape(-1) for array in (caught_up.var, *caught_up.slots))
            stepped = var
            if caught_up.rest is not None:
                rest = caught_up.rest.reshape(-1)
                if shift is None:
                    var += rest
                else:
                    stepped = rest
            buffers = scratch(form.scratch_dtypes, len(gradient))
            form.apply([stepped, *slots], gradient, buffers, numbers_of(plan, rows[part]))
            if stepped is not var:
                if decay is not None:
                    stepped -= decay * var
                var += stepped

        bring_up_some(plan, catch_up, rows[part], step, scalars if is_rounded else None)

    share_out(update_rows, range(0, len(rows), height), threads)


def _copied_if_shared(values: Array, written: Sequence[Array]) -> Array:
    shared = any(np.may_share_memory(values, array) for array in written)
    return values.copy() if shared else values


def _take(array: Array, rows: Array, out: Array) -> None:
    if array.flags.carray and array.dtype == out.dtype and array.size:
        # mode="clip" skips a check, and with it a copy; rows are known to be within range.
        _whole_rows(array).take(rows, out=_whole_rows(out), mode="clip")
    else:
        out[...] = array[rows].reshape(out.shape)


def _put(array: Array, rows: Array, values: Array) -> None:
    if array.flags.carray and array.dtype == values.dtype and array.size:
        _whole_rows(array)[rows] = _whole_rows(values)
    else:
        array[rows] = values.reshape(len(rows), *array.shape[1:])


def _whole_rows(array: Array) -> Array:
    """Views each row as one element, which numpy moves faster."""
    return array.reshape(-1).view(_row_type(array.nbytes // len(array)))


@cache
def _row_type(size: int) -> np.dtype[np.void]:
    return np.dtype((np.void, size))
