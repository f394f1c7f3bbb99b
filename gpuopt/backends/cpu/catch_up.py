"""Rows that missed steps are brought up to date, in host memory.

A row and its number of steps are written together: nothing but built-in functions runs between, so
that Ctrl-C leaves neither without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp, compiled_catch_up
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.memory import read_only
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.backends.cpu.threads import share_out
from gpuopt.backends.cpu.tiles import Rounding, round_stored
from gpuopt.interrupts import at_once
from gpuopt.rules.catch_up import STRIDE
from gpuopt.rules.rounded import rounded
from gpuopt.rules.unnamed import Movement
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]
# Of a chunk of rows: its temporary arrays stay in the second-level cache.
CHUNK_ELEMENTS = 16 * 1024


class UpToDate(NamedTuple):
    """Rows after the steps that they have missed, in the type that rules compute in.

    Attributes:
        var: The variable's, without `rest`.
        rest: A term to be added to `var` after the next step, so that both are rounded once; None
            if there is none.
        slots: The slots'.
    """

    var: Array
    rest: Array | None
    slots: list[Array]


class Missed(NamedTuple):
    """The steps that some rows have missed.

    Attributes:
        last: How many steps each row has made.
        gaps: How many it has missed.
    """

    last: Array
    gaps: Array


def up_to_date(stored: Sequence[Array], catch_up: CatchUp, missed: Missed) -> UpToDate:
    """Returns a variable's rows, and the slots', after the steps that they have missed.

    `stored` are copies of them, decoded, [num_rows, ...].
    """
    factors, rule = catch_up.factors, catch_up.rule
    var, *slots = stored
    alike = (-1, *[1] * (var.ndim - 1))  # a number for each row, beside its elements
    movement = None if rule.unnamed is None else rule.unnamed.movement
    rest, late = None, None
    if movement is not None:
        is_moved = np.zeros(var.shape, bool)
        if catch_up.sums is not None:
            move, is_moved = _movement(rule, movement, slots, catch_up, missed, alike)
            var, rest = _moved(var, np.where(is_moved, move, 0))
        if not is_moved.all():
            late = np.nonzero(~is_moved)
            # Where it may be rounded later, they are added up without the variable.
            moving = var if rest is None else rest
            stepped = _stepped([each[late] for each in (moving, *slots)], catch_up, missed, late[0])
    for slot, decay in zip(slots, factors.decays, strict=True):
        if decay != 1:
            _multiply(slot, np.power(np.float64(decay), missed.gaps).reshape(alike))
    if late is not None:
        for array, values in zip([moving, *slots], stepped, strict=True):
            array[late] = values
    return UpToDate(var, rest, slots)


def _moved(var: Array, move: Array) -> tuple[Array, Array]:
    """Returns `var - move`, and what its rounding takes from that; `move` is float64."""
    result = (var - move).astype(var.dtype, copy=False)
    rest = ((var.astype(np.float64, copy=False) - result) - move).astype(var.dtype, copy=False)
    rest[~np.isfinite(rest)] = 0  # of infinity
    return result, rest


def _movement(
    rule: UpdateRule,
    movement: Movement,
    slots: Sequence[Array],
    catch_up: CatchUp,
    missed: Missed,
    alike: tuple[int, ...],
) -> tuple[Array, Array]:
    """Returns the movement of rows from the sums, float64, and where it is close enough.

    An average of 0 does not move a row, whatever the sums leave out.
    """
    average, square = (
        slots[rule.slots.index(each)].astype(np.float64, copy=False)
        for each in (movement.average, movement.square)
    )
    first, second, third, bound = (each.reshape(alike) for each in _sums(catch_up, missed))
    epsilon = catch_up.factors.scalars[movement.epsilon]
    inverse = 1 / (np.sqrt(square) + epsilon)
    part = epsilon * inverse
    series = first - part * (second - part * third)
    left_out = part * part * part * bound
    is_close = left_out <= catch_up.factors.tolerance * abs(first)
    # Subtracted from itself, as the rule does it, infinity is NaN: such elements make each step.
    # So do those for which there is no finite sum: 0 times that were NaN.
    is_finite = np.isfinite(average + square + inverse + series)
    return average * inverse * series, (is_close | (average == 0)) & is_finite


def _sums(catch_up: CatchUp, missed: Missed) -> list[Array]:
    """Returns the sums of the steps that each row has missed, float64 [num_rows] each."""
    steps, one_earlier = catch_up.steps, catch_up.factors.one_earlier
    assert catch_up.sums is not None
    assert steps is not None
    assert one_earlier is not None
    last = missed.last
    later = -(-last // STRIDE)
    sums = list(catch_up.sums.take(later, axis=0, mode="clip").T)
    for before in range(1, STRIDE):
        step = STRIDE * later - before
        is_missed = (step >= last) & (step < last + missed.gaps)
        earlier = one_earlier.sums(sums, steps.take(step, mode="clip"))
        sums = [np.where(is_missed, *each) for each in zip(earlier, sums, strict=True)]
    return sums


def _stepped(
    arrays: Sequence[Array], catch_up: CatchUp, missed: Missed, rows: Array
) -> list[Array]:
    """Makes the steps one by one that some elements have missed.

    Args:
        arrays: Of the variable and the slots: the elements, [num_elements].
        catch_up: The table's.
        missed: By each row.
        rows: Of each element: the position of its row in `missed`.
    """
    rule, factors, steps = catch_up.rule, catch_up.factors, catch_up.steps
    unnamed = rule.unnamed
    assert unnamed is not None
    assert unnamed.movement is not None
    assert steps is not None
    order = np.argsort(-missed.gaps[rows], kind="stable")
    last, gaps = missed.last[rows][order], missed.gaps[rows][order]
    var, *slots = (each[order] for each in arrays)
    # Those that have missed k steps come first.
    counts = np.searchsorted(-gaps, -np.arange(1, min(factors.window, gaps[0]) + 1), "right")
    zeros = read_only(np.zeros_like(var))
    for done, count in enumerate(counts.tolist()):
        scalars = {**factors.scalars, unnamed.movement.step: steps[last[:count] + done]}
        rule.apply(var[:count], zeros[:count], *[slot[:count] for slot in slots], **scalars)
    # The rest of the average is too small to move a row.
    rest = np.maximum(gaps - factors.window, 0)
    for slot, decay in zip(slots, factors.decays, strict=True):
        _multiply(slot, np.power(np.float64(decay), rest))
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return [each[back] for each in (var, *slots)]


def _multiply(slot: Array, powers: Array) -> None:
    """Multiplies by powers of a decay in float64, of which steps alike make the same error."""
    np.multiply(slot, powers, out=slot, casting="same_kind", dtype=np.float64)


# Makes a step of rows that are up to date, in place.
Step = Callable[[UpToDate], object]


def bring_up(plan: DensePlan, catch_up: CatchUp, rows: Array | None, limits: CpuLimits) -> None:
    """Brings rows of a table up to date: the variable's, the slots', and their numbers of steps.

    `rows` are within range and may repeat; None for all.
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
    """Counts a step that has updated some rows, which were up to date before and may repeat.

    The table has room for a step.
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
