"""Sparse updates in host memory: repeated rows are summed, and the rule is applied to the sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars, Target, compute_type
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.catch_up import CHUNK_ELEMENTS, bring_up_some, count_step
from gpuopt.backends.cpu.chunks import chunk_length
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.dense_update import update_dense, update_strided, update_with_zero
from gpuopt.backends.cpu.forms.compiled import CompiledRule, compiled_rules
from gpuopt.backends.cpu.forms.compiled_catch_up import compiled_catch_up
from gpuopt.backends.cpu.forms.plain import PlainRule
from gpuopt.backends.cpu.forms.replayed import replayed_rules
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import scratch
from gpuopt.backends.cpu.missed_steps import UpToDate
from gpuopt.backends.cpu.row_groups import group_rows, stable_order, sum_rows
from gpuopt.backends.cpu.row_wise_update import ROW_FACTOR, update_compiled, update_rows
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.written_memory import WrittenMemory
from gpuopt.quietly import quietly
from gpuopt.rules.accumulation import place_sum
from gpuopt.rules.shift import Shift
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]


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
    [(var, slots)] = plan.targets
    written = [var, *slots]
    sums = _copied_if_shared(sums, written)
    touched = [array[rows] for array in written]
    update_with_zero(other_rows, plan, other_rows.own(scalars), limits)
    target = Target(touched[0], touched[1:])
    if sums.size < limits.large_elements:
        update_strided(rule, target, sums, scalars)
    else:
        update_dense(
            rule, DensePlan([target], WrittenMemory(touched), limits), [sums], [scalars], limits
        )
    for array, new_rows in zip(written, touched, strict=True):
        array[rows] = new_rows


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
    [(var, slots)] = plan.targets
    written = [var, *slots]
    real = np.dtype(compute_type(var.dtype))
    if values.size * ROW_FACTOR >= limits.compiled_elements and all(
        array.flags.carray and array.dtype == real for array in written
    ):
        compiled = compiled_rules(rule, real, [scalars])
        late = None if catch_up is None else compiled_catch_up(rule, catch_up, real)
        if compiled and (catch_up is None or late is not None):
            values = np.require(values, real, ["C", "ALIGNED"])
            values = _copied_if_shared(values, written)
            grouped = compiled[0].group_rows(rows, first)
            threads = limits.threads_for(values.size * ROW_FACTOR)
            update_compiled(compiled[0], written, values, grouped, threads, late)
            return grouped.rows
    values = values.astype(real, copy=False)
    groups = group_rows(rows, first)
    if len(groups.rows) == len(rows):
        sums = _copied_if_shared(values, written)
    else:
        sums, order = quietly(lambda: sum_rows(values, groups))
        rows = groups.rows[order]
    if rule.row_slots:
        update_rows(rule, written, rows, sums, scalars, limits)
        return rows
    form: RuleForm
    if sums.size * ROW_FACTOR < limits.large_elements:
        form = PlainRule(rule, scalars)
    else:
        [form] = replayed_rules(rule, real, [scalars])
    if catch_up is None:
        _update_gathered(form, real, written, sums, rows, limits)
    else:
        _update_late(form, rule.shift, written, sums, rows, scalars, catch_up, limits)
    return rows


def sum_duplicate_rows(
    values: Array, indices: Array, limits: CpuLimits, first: int = 0
) -> tuple[Array, Array]:
    """Adds up rows that share an index; see `Backend.sum_duplicate_rows`, and `group_rows`."""
    real_type = compute_type(values.dtype)
    real = np.dtype(real_type)
    values = values.astype(real, copy=False)
    compiled: Sequence[CompiledRule] = ()
    if values.size * ROW_FACTOR >= limits.compiled_elements:
        compiled = compiled_rules(place_sum, real, [{"zero": real_type(-0.0)}])
    if compiled:
        groups = compiled[0].group_rows(indices, first)
        if len(groups.rows) == len(indices):
            return values, indices
        sums = np.empty((len(groups.rows), *values.shape[1:]), real)
        values = np.require(values, requirements=["C", "ALIGNED"])
        in_order = groups._replace(rows=np.arange(len(groups.rows)))
        threads = limits.threads_for(values.size * ROW_FACTOR)
        update_compiled(compiled[0], [sums], values, in_order, threads)
        return sums, groups.rows.astype(indices.dtype, copy=False)
    groups = group_rows(indices, first)
    if len(groups.rows) == len(indices):
        return values, indices
    sums, order = quietly(lambda: sum_rows(values, groups))
    by_appearance = stable_order(groups.positions.take(groups.begins.take(order)))
    rows = groups.rows.take(order.take(by_appearance))
    return sums.take(by_appearance, axis=0), rows.astype(indices.dtype, copy=False)


def _update_gathered(
    form: RuleForm,
    real: np.dtype[Any],
    written: Sequence[Array],
    sums: Array,
    rows: Array,
    limits: CpuLimits,
) -> None:
    """Copies rows into scratch arrays, updates them there, and puts them back."""
    threads = limits.threads_for(sums.size * 2)
    longest = chunk_length(form, sums.size, threads, len(written) * real.itemsize)
    height = max(longest // max(sums[0].size, 1), 1)

    def update_rows(first: int) -> None:
        part = slice(first, first + height)
        shape = sums[part].shape
        arrays = scratch([*[real] * len(written), *form.scratch_dtypes], math.prod(shape))
        for array, buffer in zip(written, arrays, strict=False):
            _take(array, rows[part], buffer.reshape(shape))
        form.apply(arrays[: len(written)], sums[part].reshape(-1), arrays[len(written) :])
        for array, buffer in zip(written, arrays, strict=False):
            _put(array, rows[part], buffer.reshape(shape))

    share_out(update_rows, range(0, len(rows), height), threads)


def _update_late(
    form: RuleForm,
    shift: Shift | None,
    written: Sequence[Array],
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
    decay = None if shift is None or shift.decay is None else scalars[shift.decay]

    def update_rows(first: int) -> None:
        part = slice(first, first + height)
        gradient = sums[part].reshape(-1)

        def step(behind: UpToDate) -> None:
            var, *slots = (array.reshape(-1) for array in (behind.var, *behind.slots))
            stepped = var
            if behind.rest is not None:
                rest = behind.rest.reshape(-1)
                if shift is None:
                    var += rest
                else:
                    stepped = rest
            form.apply([stepped, *slots], gradient, scratch(form.scratch_dtypes, len(gradient)))
            if stepped is not var:
                if decay is not None:
                    stepped -= decay * var
                var += stepped

        bring_up_some(written, catch_up, rows[part], step)

    share_out(update_rows, range(0, len(rows), height), threads)


def _copied_if_shared(values: Array, written: Sequence[Array]) -> Array:
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
