"""Stochastic rounding of bfloat16 variables and slots as an option of optimizers."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import SlotCodecs
from gpuopt.step.rounding import StochasticRounding

_MOST_SEEDS = 2**63


def checked_rounding(
    seed: Any, rule: UpdateRule, slot_codecs: SlotCodecs
) -> StochasticRounding | None:
    """Returns the rounding with a seed; None if there is no seed.

    Raises:
        TypeError: the seed is no whole number.
        ValueError: it is below 0 or has more than 63 bits, the rule has slots of rows, or there are
            slots in 8 bits, or of their own type float32, or master copies with float32 slots.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(
            f"stochastic_rounding must be a seed, a whole number, or None, got {seed!r}"
        )
    if not 0 <= int(seed) < _MOST_SEEDS:
        raise ValueError(f"stochastic_rounding must be a seed from 0 to 2^63 - 1, got {seed}")
    masters, slot_dtype = slot_codecs.masters, slot_codecs.slot_dtype
    problem = ""
    if rule.row_slots:
        problem = (
            f"of the rule {rule.name}, whose slots {', '.join(rule.row_slots)} have a number for "
            'each row: use masters="float32"'
        )
    elif masters is not None and slot_dtype is None:
        problem = (
            f"with masters={masters!r}, which lose no digits. Leave one of them out, or give "
            'slot_dtype="bfloat16"'
        )
    elif slot_dtype is not None and slot_dtype != BFLOAT16:
        problem = (
            f'with slot_dtype="{slot_dtype}": leave one of them out, or give slot_dtype="bfloat16"'
        )
    elif slot_codecs.coded:
        problem = "with slot_bits=8: codes are rounded to nearest. Leave one of them out"
    if problem:
        raise ValueError(f"stochastic_rounding={seed} cannot be had {problem}")
    return StochasticRounding(int(seed), slot_dtype is not None)
