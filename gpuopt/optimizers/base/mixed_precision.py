"""Master copies of 16-bit variables as an option of optimizers."""

from __future__ import annotations

from typing import Any, cast, get_args

import numpy as np

from gpuopt.choices import is_one_of
from gpuopt.optimizers.base.slot_dtype import name_of_dtype
from gpuopt.state.slot_codecs import Masters, SlotCodes


def checked_masters(
    given: Masters | type[Any] | np.dtype[Any] | None, slot_codes: SlotCodes | None
) -> Masters | None:
    """Returns the option; a type that numpy knows stands for its name.

    Raises:
        ValueError: it is unknown, or slots are in 8 bits.
    """
    if given is None:
        return None
    known: tuple[Masters, ...] = get_args(Masters)
    name = name_of_dtype(given)
    if not is_one_of(name, known):
        raise ValueError(f"masters must be None or one of {list(known)}, got {given!r}")
    if slot_codes is not None:
        raise ValueError(
            f"masters={given!r} cannot be had with slot_bits=8: slots beside master copies are "
            "float32. Leave one of them out"
        )
    return cast("Masters", name)
