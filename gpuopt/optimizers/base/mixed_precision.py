"""Master copies of 16-bit variables as an option of optimizers."""

from __future__ import annotations

from typing import get_args

from gpuopt.rules.slot_codes import SlotCodes
from gpuopt.state.masters import Masters
from gpuopt.step.averages import FollowingAverages


def checked_masters(
    masters: Masters | None, slot_codes: SlotCodes | None, averages: FollowingAverages | None
) -> Masters | None:
    """Returns the option.

    Raises:
        ValueError: it is unknown, slots are in 8 bits, or averages are made in the step.
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
    if averages is not None:
        raise ValueError(
            f"masters={masters!r} cannot be had with averages=: an average in the step would be of "
            "the master copies. Call averages.apply after each step"
        )
    return masters
