"""Slots in a type of their own as an option of optimizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.choices import is_one_of
from gpuopt.rules.rounded import BFLOAT16
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import SlotCodes, SlotDtype

_TYPES: dict[str, np.dtype[Any]] = {each.name: each for each in (BFLOAT16, np.dtype(np.float32))}


def checked_slot_dtype(
    slot_dtype: SlotDtype | type[Any] | np.dtype[Any] | None,
    rule: UpdateRule,
    slot_codes: SlotCodes | None,
) -> np.dtype[Any] | None:
    """Returns the type of all slots; None if they have their variables'.

    A type that numpy knows stands for its name.

    Raises:
        ValueError: the option has another value, the rule has no slots or slots of rows, or slots
            are in 8 bits.
    """
    if slot_dtype is None:
        return None
    name = name_of_dtype(slot_dtype)
    if not is_one_of(name, _TYPES):
        raise ValueError(f'slot_dtype must be None, "bfloat16" or "float32", got {slot_dtype!r}')
    problem = ""
    if slot_codes is not None:
        problem = "with slot_bits=8. Leave one of them out"
    elif not rule.slots:
        problem = f"of the rule {rule.name}, which has no slots. Leave it out"
    elif rule.row_slots:
        problem = (
            f"of the rule {rule.name}, whose slots {', '.join(rule.row_slots)} have a number for "
            "each row. Leave it out"
        )
    if problem:
        raise ValueError(f"slot_dtype={slot_dtype!r} cannot be had {problem}")
    return _TYPES[name]


def name_of_dtype(given: Any) -> Any:
    """Returns the name of a type, as `np.float32` or `np.dtype("float32")`; all else as it is."""
    if not isinstance(given, type | np.dtype):  # an array or a number has a type, and is none
        return given
    try:
        return np.dtype(given).name
    except (TypeError, ValueError):  # it names none
        return given
