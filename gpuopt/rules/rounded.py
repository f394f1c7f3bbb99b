"""Stochastic rounding of what a rule writes to bfloat16 variables; see kernels/shared/rounding.cuh.

A float32 becomes one of its two neighbours among the bfloat16: the upper one with the probability
of its distance from the lower one, so that the mean is the number itself. Numbers that are bfloat16
stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from gpuopt.rules.stage import Stage
from gpuopt.rules.staged import StagedRule, staged
from gpuopt.rules.update_rule import UpdateRule

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_BITS = 16
# How many arrays share a word of random bits.
_ARRAYS = 4
_LAST_FINITE = 0x7F7F0000
_INFINITE = 0x7F800000


def store_at_random(random: Any) -> None:
    """Does nothing: loops round what they store, by the random bits; see `round_at_random`."""


ROUNDING = Stage("rounded", store_at_random)


def rounded(base: UpdateRule) -> StagedRule:
    """Returns the rule that does what `base` does; backends round what it writes.

    It has the slots of `base`, and the key of a step's random bits after its scalars.
    """
    return staged(base, ROUNDING)


def key_of_step(seed: int, step: int) -> dict[str, np.float32]:
    """Returns the scalars of a step, counted from 0."""
    return ROUNDING.key(seed, step)


def round_at_random(
    arrays: Sequence[Any], numbers: Any, scalars: Mapping[str, np.floating[Any]]
) -> list[Any]:
    """Rounds float32 arrays to bfloat16, stochastically; returns None for None.

    The result depends on the arguments alone, bit by bit. Numbers above the last finite bfloat16
    are rounded to nearest; infinity stays, and every NaN as some NaN.

    Args:
        arrays: float32 [size], the variable and its slots; None for one that is not rounded.
        numbers: uint64 [size], of the elements in their variable.
        scalars: Those of `key_of_step`.
    """
    words = np.uint64(-(-len(arrays) // _ARRAYS))
    result: list[Any] = []
    for position, array in enumerate(arrays):
        word, place = divmod(position, _ARRAYS)
        if place == 0:
            random = ROUNDING.random(scalars, numbers * words + np.uint64(word))
        if array is None:
            result.append(None)
            continue
        mine = (random >> np.uint64(_BITS * place)).astype(np.uint16).astype(np.uint32)
        result.append(_rounded(array, mine))
    return result


def _rounded(values: Any, random: Any) -> Any:
    bits = values.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    upper = (bits + np.where(magnitude >= _LAST_FINITE, np.uint32(0x8000), random)) >> _BITS
    upper = np.where(magnitude > _INFINITE, bits >> _BITS | 0x40, upper)
    return upper.astype(np.uint16).view(BFLOAT16)
