"""The effect of missed steps on rows, in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.catch_up import CatchUp
from gpuopt.backends.cpu.memory import read_only
from gpuopt.rules.catch_up import STRIDE
from gpuopt.rules.unnamed import Movement
from gpuopt.rules.update_rule import UpdateRule

Array = np.ndarray[Any, Any]


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

    Args:
        stored: Copies of them, decoded, [num_rows, ...].
        catch_up: The table's.
        missed: By each row.
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
    """Returns `var - move`, and what its rounding takes from that.

    Args:
        var: In the type that rules compute in.
        move: In float64.
    """
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
