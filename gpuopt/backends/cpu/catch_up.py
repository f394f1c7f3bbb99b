"""Rows that missed steps are brought up to date, in host memory.

A row and its number of steps are written together: nothing but built-in functions runs between, so
that neither Ctrl-C nor a signal handler that reads the table sees one without the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import attrgetter, call, eq, getitem, methodcaller, setitem
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars, compute_type
from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.dense_plan import DensePlan
from gpuopt.backends.cpu.forms.compiled_catch_up import CompiledCatchUp, compiled_catch_up
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.backends.cpu.threads import share_out
from gpuopt.quietly import quietly
from gpuopt.rules.catch_up import STRIDE
from gpuopt.rules.unnamed import Movement
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]

# Of a chunk of rows: its temporary arrays stay in the second-level cache.
_CHUNK_ELEMENTS = 16 * 1024


class _Missed(NamedTuple):
    """The steps that some rows have missed.

    Attributes:
        last: How many steps each row has made.
        gaps: How many it has missed.
    """

    last: Array
    gaps: Array


class CpuLateRows:
    """See `LateRows`."""

    counts_nested_steps = True

    def __init__(self, limits: CpuLimits) -> None:
        self._limits = limits

    def bring_up(self, plan: DensePlan, catch_up: CatchUp, rows: Array | None = None) -> None:
        [(var, slots)] = plan.targets
        rows = None if rows is None else np.asarray(rows).reshape(-1)
        quietly(partial(bring_up, [var, *slots], catch_up, rows, self._limits))


def bring_up(
    written: Sequence[Array], catch_up: CatchUp, rows: Array | None, limits: CpuLimits
) -> None:
    """Brings rows up to date: the variable's, the slots', and their numbers of steps.

    Args:
        written: The variable and its slots, [height, ...].
        catch_up: The table's.
        rows: Which, within range; they may repeat. None for all.
        limits: See `CpuLimits`.
    """
    real = np.dtype(compute_type(written[0].dtype))
    size = written[0].size * len(written)
    if rows is not None:
        size = len(rows) * written[0][:1].size * len(written)
    if size >= limits.large_elements and all(
        array.flags.carray and array.dtype == real for array in written
    ):
        compiled = compiled_catch_up(catch_up.rule, catch_up, real)
        if compiled is not None:
            _bring_up_compiled(compiled, written, catch_up, rows, limits)
            return
    now = catch_up.now
    if rows is None:
        late = np.flatnonzero(catch_up.last < now)
    else:
        late = np.unique(rows[catch_up.last[rows] < now])
    width = max(written[0][:1].size, 1)
    height = max(_CHUNK_ELEMENTS // width, 1)

    def bring_up_chunk(first: int) -> None:
        some = late[first : first + height]
        while not _bring_up_some(written, catch_up, some):
            some = some[catch_up.last[some] < catch_up.now]

    threads = limits.threads_for(len(late) * width * len(written))
    share_out(bring_up_chunk, range(0, len(late), height), threads)


def _bring_up_some(written: Sequence[Array], catch_up: CatchUp, some: Array) -> bool:
    """Brings rows up to date that are all behind.

    Returns:
        Whether it did: not if a signal handler has brought up or written any of them meanwhile, or
        made a step.
    """
    now, targets = catch_up.now, (*written, catch_up.last)
    # All at once, as they are written: see `_at_once`.
    *stored, last = list(map(getitem, targets, repeat(some)))
    if (last >= now).any():
        return False
    new = _up_to_date(stored, catch_up, _Missed(last, now - last))
    new.append(np.full(len(some), now, np.int32))
    calls = [partial(setitem, *each) for each in zip(targets, repeat(some), new)]
    counts = zip(
        map(attrgetter("now"), [catch_up]),
        map(methodcaller("tobytes"), map(getitem, [catch_up.last], [some])),
        strict=True,
    )
    are_same = map(eq, [(now, last.tobytes())], counts)
    return bool(list(map(call, chain.from_iterable(compress([calls], are_same)))))


def _bring_up_compiled(
    compiled: CompiledCatchUp,
    written: Sequence[Array],
    catch_up: CatchUp,
    rows: Array | None,
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
        compiled.bring_up_rows(written, late, first, min(first + height, number))

    share_out(bring_up_chunk, range(0, number, height), threads)


def count_step(catch_up: CatchUp, rows: Array, scalars: Scalars, now: int) -> bool:
    """Counts a step that has updated some rows, which were up to date before.

    Args:
        catch_up: The table's, with room for a step.
        rows: Which; they may repeat.
        scalars: Of the step.
        now: How many steps these rows had made.

    Returns:
        Whether it did: not if a signal handler has counted another meanwhile.
    """
    factors = catch_up.factors
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
    return _at_once([*calls, partial(setattr, catch_up, "now", now + 1)], catch_up, now)


def _at_once(calls: Sequence[Callable[[], object]], catch_up: CatchUp, now: int) -> bool:
    """Calls built-in functions if so many steps were counted; no signal handler runs between.

    Returns:
        Whether it called them.
    """
    are_as_many = map(eq, [now], map(attrgetter("now"), [catch_up]))
    return bool(list(map(call, chain.from_iterable(compress([calls], are_as_many)))))


def _up_to_date(stored: Sequence[Array], catch_up: CatchUp, missed: _Missed) -> list[Array]:
    """Returns a variable's rows, and the slots', after the steps that they have missed.

    Args:
        stored: Copies of them, [num_rows, ...].
        catch_up: The table's.
        missed: By each row.
    """
    factors, rule = catch_up.factors, catch_up.rule
    real = np.dtype(compute_type(stored[0].dtype)).type
    var, *slots = [each.astype(real, copy=False) for each in stored]
    alike = (-1, *[1] * (var.ndim - 1))  # a number for each row, beside its elements
    movement = None if rule.unnamed is None else rule.unnamed.movement
    late = None
    if movement is not None:
        is_moved = np.zeros(var.shape, bool)
        if catch_up.sums is not None:
            move, is_moved = _movement(rule, movement, slots, catch_up, missed, alike)
            np.subtract(var, move, out=var, where=is_moved)
        if not is_moved.all():
            late = np.nonzero(~is_moved)
            stepped = _stepped([each[late] for each in (var, *slots)], catch_up, missed, late[0])
    for slot, decay in zip(slots, factors.decays, strict=True):
        if decay != 1:
            slot *= _powers(decay, missed.gaps, real).reshape(alike)
    new = [var, *slots]
    if late is not None:
        for array, values in zip(new, stepped, strict=True):
            array[late] = values
    return new


def _movement(
    rule: UpdateRule,
    movement: Movement,
    slots: Sequence[Array],
    catch_up: CatchUp,
    missed: _Missed,
    alike: tuple[int, ...],
) -> tuple[Array, Array]:
    """Returns what rows move by, from the sums, and where that is close enough.

    An average of 0 does not move a row, whatever the sums leave out.
    """
    average, square = (
        slots[rule.slots.index(each)] for each in (movement.average, movement.square)
    )
    first, second, third, bound = (each.reshape(alike) for each in _sums(catch_up, missed))
    epsilon = catch_up.factors.scalars[movement.epsilon]
    inverse = 1 / (np.sqrt(square) + epsilon)
    part = epsilon * inverse
    series = first - part * (second - part * third)
    left_out = part * part * part * bound
    is_close = left_out <= average.dtype.type(catch_up.factors.tolerance) * abs(first)
    # Subtracted from itself, as the rule does it, infinity is NaN: such elements make each step.
    # So do those for which there is no finite sum: 0 times that were NaN.
    is_finite = np.isfinite(average + square + inverse + series)
    return average * inverse * series, (is_close | (average == 0)) & is_finite


def _sums(catch_up: CatchUp, missed: _Missed) -> list[Array]:
    """Returns the sums of the steps that each row has missed, [num_rows] each."""
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
    arrays: Sequence[Array], catch_up: CatchUp, missed: _Missed, rows: Array
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
    zeros = np.zeros_like(var)
    for done, count in enumerate(counts.tolist()):
        scalars = {**factors.scalars, unnamed.movement.step: steps[last[:count] + done]}
        rule.apply(var[:count], zeros[:count], *[slot[:count] for slot in slots], **scalars)
    # What is left of the average by now moves nothing.
    rest = np.maximum(gaps - factors.window, 0)
    for slot, decay in zip(slots, factors.decays, strict=True):
        slot *= _powers(decay, rest, slot.dtype.type)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return [each[back] for each in (var, *slots)]


def _powers(decay: float, gaps: Array, real: Any) -> Array:
    powers: Array = np.power(np.float64(decay), gaps).astype(real)
    return powers
