"""Rows that missed steps are brought up to date, in host memory.

A row and its number of steps are written together: nothing but built-in functions runs between, so
that Ctrl-C leaves neither without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp, compiled_catch_up
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.missed_steps import Missed, UpToDate, up_to_date
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.tiles import Rounding, round_stored
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.interrupts import at_once
from gpuopt.rules.catch_up import STRIDE
from gpuopt.rules.rounded import rounded

Array = np.ndarray[Any, Any]

# Makes a step of rows that are up to date, in place.
Step = Callable[[UpToDate], object]

# Of a chunk of rows: its temporary arrays stay in the second-level cache.
CHUNK_ELEMENTS = 16 * 1024


class CpuLateRows:
    """See `LateRows`."""

    def __init__(self, limits: CpuLimits) -> None:
        self._limits = limits

    def bring_up(self, plan: DensePlan, catch_up: CatchUp, rows: Array | None = None) -> None:
        rows = None if rows is None else np.asarray(rows).reshape(-1)
        ignore_fp_warnings(partial(bring_up, plan, catch_up, rows, self._limits))


def bring_up(plan: DensePlan, catch_up: CatchUp, rows: Array | None, limits: CpuLimits) -> None:
    """Brings rows up to date: the variable's, the slots', and their numbers of steps.

    Args:
        plan: Of the table alone.
        catch_up: The table's.
        rows: Which, within range; they may repeat. None for all.
        limits: See `CpuLimits`.
    """
    [written] = plan.arrays
    size = written[0].size * len(written)
    if rows is not None:
        size = len(rows) * written[0][:1].size * len(written)
    if size >= limits.large_elements and not plan.strided:
        rule = catch_up.rule if catch_up.rounding is None else rounded(catch_up.rule)
        compiled = compiled_catch_up(rule, catch_up, plan.codecs, plan.real)
        if compiled is not None:
            scalars = {**catch_up.factors.scalars, **(catch_up.rounding or {})}
            own = np.array([scalars[name] for name in rule.scalars], plan.real)
            _bring_up_compiled(compiled, written, catch_up, rows, own, limits)
            return
    now = catch_up.now
    if rows is None:
        late = np.flatnonzero(catch_up.last < now)
    else:
        late = np.unique(rows[catch_up.last[rows] < now])
    width = max(written[0][:1].size, 1)
    height = max(CHUNK_ELEMENTS // width, 1)

    def bring_up_chunk(first: int) -> None:
        some = late[first : first + height]
        bring_up_some(plan, catch_up, some, scalars=catch_up.rounding)

    threads = limits.threads_for(len(late) * width * len(written))
    share_out(bring_up_chunk, range(0, len(late), height), threads)


def bring_up_some(
    plan: DensePlan,
    catch_up: CatchUp,
    some: Array,
    step: Step | None = None,
    scalars: Scalars | None = None,
) -> None:
    """Brings rows up to date, has them make a step after that, and encodes and writes them once.

    Args:
        plan: Of the table alone.
        catch_up: The table's.
        some: Which, within range, without repeats.
        step: Makes the step; None for none: then the rows are all behind.
        scalars: Those of the rounding, if numbers are rounded at random; else None.
    """
    [written], codecs, now = plan.arrays, plan.codecs, catch_up.now
    last = catch_up.last[some]
    stored = [np.ascontiguousarray(array[some]) for array in written]
    buffers = [np.empty(stored[0].size, plan.real) for _ in range(codecs.num_decoded)]
    numbers = codecs.decode(stored, buffers)
    shape = stored[0].shape
    missed = Missed(last, np.maximum(now - last, 0))
    rows = up_to_date([each.reshape(shape) for each in numbers], catch_up, missed)
    if step is not None:
        step(rows)
    elif rows.rest is not None:
        np.add(rows.var, rows.rest, out=rows.var)
    for number, new in zip(numbers, (rows.var, *rows.slots), strict=True):
        number[...] = new.reshape(-1)
    if scalars is not None:
        rounding = Rounding(is_averaged=False, scalars=scalars)
        round_stored(codecs, numbers, None, numbers_of(plan, some).within(), rounding)
    codecs.encode(numbers, stored)
    calls = [partial(setitem, *each) for each in zip(written, repeat(some), stored)]
    at_once([*calls, partial(setitem, catch_up.last, some, np.int32(now))])


def numbers_of(plan: DensePlan, rows: Array) -> Numbers:
    """Returns the numbers of the elements of some rows of a plan's only variable."""
    [target] = plan.targets
    return Numbers(0, target.var[:1].size, rows, target.first_number)


def _bring_up_compiled(
    compiled: CompiledCatchUp,
    written: Sequence[Array],
    catch_up: CatchUp,
    rows: Array | None,
    scalars: Array,
    limits: CpuLimits,
) -> None:
    late = None
    if rows is not None:
        # In different threads, a row must not be brought up twice.
        late = np.unique(rows[catch_up.last[rows] < catch_up.now]).astype(np.int64, copy=False)
    number = len(written[0]) if late is None else len(late)
    width = max(written[0][:1].size, 1)
    threads = limits.threads_for(number * width * len(written))
    # In a tall table, a call for each few rows would take longer than what it computes.
    height = max(compiled.most_elements // width, number // (16 * threads), 1)

    def bring_up_chunk(first: int) -> None:
        compiled.bring_up_rows(written, late, first, min(first + height, number), scalars)

    share_out(bring_up_chunk, range(0, number, height), threads)


def count_step(catch_up: CatchUp, rows: Array, scalars: Scalars) -> None:
    """Counts a step that has updated some rows, which were up to date before.

    Args:
        catch_up: The table's, with room for a step.
        rows: Which; they may repeat.
        scalars: Of the step.
    """
    factors, now = catch_up.factors, catch_up.now
    step_size, steps, sums = catch_up.step_size(scalars), catch_up.steps, catch_up.sums
    calls = [partial(setitem, catch_up.last, rows, np.int32(now + 1))]
    if steps is not None:
        calls.append(partial(setitem, steps, now, step_size))
    if sums is not None and factors.weights is not None and step_size is not None:
        first = -(-max(now + 1 - factors.window, 0) // STRIDE)
        changed = sums[first : now // STRIDE + 1]
        weights = factors.weights[STRIDE * first + factors.window - now - 1 :: STRIDE]
        sizes = np.array([step_size] * 3 + [abs(step_size)], sums.dtype)
        calls.append(partial(setitem, changed, ..., changed + sizes * weights))
    at_once([*calls, partial(setattr, catch_up, "now", now + 1)])
