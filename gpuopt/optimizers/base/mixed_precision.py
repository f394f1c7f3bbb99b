"""Master copies of 16-bit variables as an option of optimizers."""

from __future__ import annotations

from typing import get_args

from gpuopt.rules.slot_codes import SlotCodes
from gpuopt.state.masters import Masters


def checked_masters(masters: Masters | None, slot_codes: SlotCodes | None) -> Masters | None:
    """Returns the option.

    Raises:
        ValueError: it is unknown, or slots are in 8 bits.
    """
    if masters is None:
        return None
    if masters not in get_args(Masters):
        raise ValueError(
            f"masters must be None or one of {list(get_args(Masters))}, got {masters!r}"
        )
    if slot_codes is not None:
        raise ValueError(
            f"masters={masters!r} cannot be had with slot_bits=8: slots beside master copies are "
            "float32. Leave one of them out"
        )
    return masters
