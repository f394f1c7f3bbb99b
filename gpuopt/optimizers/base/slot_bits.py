"""Slots in 8 bits as an option of optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from gpuopt.choices import is_one_of
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import SlotCodecs, SlotCodes, SlotForm, slot_codes
from gpuopt.variables.variable import Variable

SlotBits = Literal[8, 32]

# The largest finite scale.
LARGEST_SCALE = float(np.finfo(np.float32).max)


def slot_codes_of(
    slot_bits: SlotBits, slot_form: SlotForm, rule: UpdateRule, optimizer: str
) -> SlotCodes | None:
    """Returns how slots are stored in 8 bits; None if they are to be as they are.

    Args:
        slot_bits: The option.
        slot_form: The form of squares.
        rule: The optimizer's.
        optimizer: Its class's name, for errors.

    Raises:
        ValueError: an option has another value, or the rule's slots are not stored in 8 bits.
    """
    if isinstance(slot_bits, bool) or not is_one_of(slot_bits, (8, 32)):
        raise ValueError(f"slot_bits must be 8 or 32, got {slot_bits!r}")
    if slot_bits == 32:
        if slot_form != "root":
            raise ValueError(f"slot_form={slot_form!r} is for slot_bits=8, which is not given")
        return None
    try:
        return slot_codes(rule, slot_form)
    except ValueError as error:
        raise ValueError(f"{optimizer}: {error}") from None


def check_coded_slot(
    codecs: SlotCodecs, slot_name: str, slot: Variable, variable: Variable
) -> None:
    """Raises ValueError if user code has put something else in the place of a slot's codes."""
    by_rows = slot.ndim == 2
    shape, dtype, _ = codecs.form(slot_name, variable.shape, variable.dtype, by_rows=by_rows)
    if (slot.shape, slot.dtype, slot.device) != (shape, dtype, variable.device):
        raise ValueError(
            f'slot "{slot_name}" of "{variable.name}" is in 8 bits: it must be {dtype} of shape '
            f"{shape} on {variable.device}; it is {slot.dtype} of shape {slot.shape} on "
            f"{slot.device}"
        )


def check_coded_blocks(codes: SlotCodes, slots: Sequence[Variable], variable: Variable) -> None:
    """Raises ValueError unless the blocks of all of a variable's slots are the same.

    Args:
        codes: How slots are stored.
        slots: Those of `codes.stored`, in order, each for itself as it should be.
        variable: Whose they are.
    """
    shapes = {name: slot.shape for name, slot in zip(codes.stored, slots, strict=True)}
    of_scales = {name: shape for name, shape in shapes.items() if codes.stored[name] is None}
    if len(set(of_scales.values())) > 1:
        raise ValueError(
            f'the slots of "{variable.name}" have blocks that end at rows and others that do not: '
            f"its scales are of shapes {of_scales}. Restore all slots of one state"
        )
