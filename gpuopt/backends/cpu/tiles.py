"""Chunks of a variable and its slots, decoded, updated and encoded by numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.backends.cpu.forms.rule_form import RuleForm
from gpuopt.backends.cpu.numbers import Numbers
from gpuopt.codecs import Codecs
from gpuopt.rules.averaged import AVERAGE_WEIGHT, follow
from gpuopt.rules.rounded import round_at_random

Array = np.ndarray[Any, Any]

# The most elements that are rounded at a time, or encoded in 8 bits: the temporaries stay in the
# second-level cache.
_MOST_ROUNDED = 1 << 14
_MOST_CODED = 1 << 13


class Rounding(NamedTuple):
    """How elements are rounded stochastically.

    Attributes:
        is_averaged: Whether the first slot is a moving average, which is rounded to nearest.
        scalars: The rule's; the key of the step's random bits is one of them.
    """

    is_averaged: bool
    scalars: Scalars


def cut_short(longest: int, codecs: Codecs, *, is_rounded: bool) -> int:
    """Returns how many elements `update_tile` should be given, at most `longest`."""
    if codecs.per_block:
        return min(longest, _MOST_CODED)
    return min(longest, _MOST_ROUNDED) if is_rounded else longest


def buffers_for(
    form: RuleForm, codecs: Codecs, real: np.dtype[Any], gradient: np.dtype[Any] | None
) -> list[np.dtype[Any]]:
    """Returns the types of the scratch arrays that `update_tile` needs."""
    casts_gradient = gradient not in (None, real)
    return [*[real] * (codecs.num_decoded + casts_gradient), *form.scratch_dtypes]


def update_tile(
    form: RuleForm,
    codecs: Codecs,
    real: np.dtype[Any],
    arrays: Sequence[Array],
    grad: Array | None,
    buffers: Sequence[Array],
    numbers: Numbers,
    rounding: Rounding | None = None,
) -> None:
    """Decodes some elements of a variable and its slots, applies a rule, and encodes them.

    Args:
        form: The rule.
        codecs: How the variable and its slots are stored.
        real: The type that the rule computes in.
        arrays: As `codecs` take them, contiguous. If blocks of codes end at rows, [num_rows, ...].
        grad: Flat; None if the form was made for a gradient of zeros.
        buffers: Scratch arrays, at least as long as the variable's; see `buffers_for`.
        numbers: Of the elements in their variable.
        rounding: None if all is rounded to nearest.
    """
    size, buffers = arrays[0].size, list(buffers)
    values = codecs.decode(arrays, buffers)
    del buffers[: codecs.num_decoded]
    if grad is not None and grad.dtype != real:
        converted = buffers.pop(0)[:size]
        np.copyto(converted, grad, casting="unsafe")
        grad = converted
    average = values[1].copy() if rounding is not None and rounding.is_averaged else None
    form.apply(values, grad, [each[:size] for each in buffers], numbers)
    if rounding is not None:
        round_stored(codecs, values, average, numbers.within(), rounding)
    codecs.encode(values, arrays)


def round_stored(
    codecs: Codecs,
    values: Sequence[Array],
    average: Array | None,
    numbers: Array,
    rounding: Rounding,
) -> None:
    """Rounds the numbers of those codecs that are rounded at random (`Codec.is_rounded`).

    An average follows the rounded variable. The rule has moved it towards the variable before
    rounding, so it moves again from `average`, its value before the rule.
    """
    own = [0, *range(1 + rounding.is_averaged, len(values))]
    chosen = [values[k] if codecs.every[k].is_rounded else None for k in own]
    for k, rounded in zip(own, round_at_random(chosen, numbers, rounding.scalars), strict=True):
        if rounded is not None:
            values[k][:] = rounded
    if average is not None:
        follow(average, codecs.var.as_stored(values[0]), rounding.scalars[AVERAGE_WEIGHT])
        values[1][:] = average
