"""Stochastic rounding of bfloat16 variables and their slots, as a part of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from gpuopt.rules.rounded import BFLOAT16, ROUNDING
from gpuopt.step.stage_options import StageOption
from gpuopt.variables.variable import Variable

_MOST_SEEDS = 2**63


class StochasticRounding(StageOption):
    """How an optimizer rounds what it writes to bfloat16 variables and slots.

    Attributes:
        seed: Of the random bits.
        has_own_slots: Whether slots are bfloat16 beside variables of any type.
        has_masters: Whether 16-bit variables have master copies, which are float32.
    """

    name = "stochastic_rounding"
    meaning = (
        "New bfloat16 values are rounded up or down at random, with this seed. The exact value is "
        "the mean. The random bits depend only on the seed, the count of steps, the element and "
        "the slot. It can be combined with `masters` if there is a `slot_dtype`, and not with "
        "slots that have a number for each row. Slots in 8 bits are rounded to nearest."
    )
    alone = 0
    stage = ROUNDING
    counter = "rounded_steps"
    by_hooks = "which is rounded to nearest"
    in_torch = "torch's optimizers round to nearest: export a run of float32 variables"

    def __init__(self, seed: int, has_own_slots: bool, has_masters: bool) -> None:
        self.seed = seed
        self.has_own_slots = has_own_slots
        self.has_masters = has_masters

    @classmethod
    def checked(cls, given: Any, optimizer: Any) -> StochasticRounding:
        """Returns the rounding with a seed.

        Raises:
            TypeError: the seed is no whole number.
            ValueError: it is below 0 or has more than 63 bits, the rule has slots of rows, or there
                are slots of their own type float32, or master copies without a type of slots.
        """
        if isinstance(given, bool) or not isinstance(given, Integral):
            raise TypeError(
                f"stochastic_rounding must be a seed, a whole number, or None, got {given!r}"
            )
        if not 0 <= int(given) < _MOST_SEEDS:
            raise ValueError(f"stochastic_rounding must be a seed from 0 to 2^63 - 1, got {given}")
        rule, codecs = optimizer.rule, optimizer.options.codecs
        masters, slot_dtype = codecs.masters, codecs.slot_dtype
        problem = ""
        if rule.row_slots:
            problem = (
                f"of the rule {rule.name}, whose slots {', '.join(rule.row_slots)} have a number "
                'for each row: use masters="float32"'
            )
        elif masters is not None and slot_dtype is None:
            problem = (
                f"with masters={masters!r}, which lose no digits. Leave one of them out, or give "
                'slot_dtype="bfloat16"'
            )
        elif slot_dtype is not None and slot_dtype != BFLOAT16:
            problem = (
                f'with slot_dtype="{slot_dtype}": leave one of them out, or give '
                'slot_dtype="bfloat16"'
            )
        if problem:
            raise ValueError(f"stochastic_rounding={given} cannot be had {problem}")
        has_own_slots = any(codec.is_rounded for codec in codecs.values())
        return cls(int(given), has_own_slots, masters is not None)

    def joins(self, dtype: np.dtype[Any]) -> bool:
        return self.has_own_slots or bool(dtype == BFLOAT16)

    def check(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            if variable.dtype == np.float16 and not self.has_masters:
                raise ValueError(
                    f'stochastic_rounding: "{variable.name}" is float16, and only bfloat16 '
                    'variables are rounded so: use masters="float32", or make it bfloat16'
                )

    def described(self) -> int:
        return self.seed

    def scalars(self, steps: int) -> Mapping[str, np.float32]:
        return self.stage.key(self.seed, steps)
