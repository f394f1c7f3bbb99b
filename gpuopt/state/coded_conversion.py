"""Saved states with slots in 8 bits for optimizers without, the other way, and between forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuopt.quietly import quietly
from gpuopt.rules.slot_codes import BLOCK, MAP, SlotCodes, encoded, scales_name
from gpuopt.state.coded_slots import decoded_array
from gpuopt.state.slot_dtypes import dtype_of_slots
from gpuopt.variables.variable import Variable

if TYPE_CHECKING:
    from gpuopt.state.state import Description
    from gpuopt.state.state_dict import OptimizerState

Slots = dict[str, dict[str, Any]]

# Of what a state says about itself.
_BITS, _BLOCK, _MAP, _FORM, _CODINGS = (
    "slot_bits",
    "slot_block",
    "slot_map",
    "slot_form",
    "slot_codings",
)


def described_codes(codes: SlotCodes) -> dict[str, Any]:
    """Returns what a saved state says about slots in 8 bits."""
    codings = zip(codes.slots, codes.codings, strict=True)
    return {
        _BITS: 8,
        _BLOCK: BLOCK,
        _MAP: MAP,
        _FORM: codes.form,
        _CODINGS: {name: coding.name.lower() for name, coding in codings},
    }


def as_stored(
    saved: OptimizerState, optimizer: Description, variables: Mapping[str, Variable]
) -> OptimizerState:
    """Returns a saved state with slots as an optimizer stores them: itself if they are so.

    Args:
        saved: A state of the right form.
        optimizer: How it stores slots, and of which types those are that are no codes.
        variables: The variables that exist, by their names in the state.

    Raises:
        ValueError: the saved slots have blocks or a map that are not known, or are damaged.
    """
    hyperparameters, codes = saved["hyperparameters"], optimizer.slot_codes
    theirs = hyperparameters.get(_CODINGS) if isinstance(hyperparameters, Mapping) else None
    ours = None if codes is None else described_codes(codes)[_CODINGS]
    if theirs is not None:
        found = [hyperparameters.get(name) for name in (_BITS, _BLOCK, _MAP)]
        if found != [8, BLOCK, MAP] or not isinstance(theirs, Mapping):
            raise ValueError(
                f"the saved slots are of {found[0]!r} bits, in blocks of {found[1]!r} by the map "
                f"{found[2]!r}; this version of gpuopt reads those of 8 bits, in blocks of {BLOCK} "
                f"by the map {MAP!r}"
            )
    if theirs == ours:
        return saved
    slots: Slots = {name: dict(by_variable) for name, by_variable in saved["slots"].items()}
    if theirs is not None:
        kept = ours or {}
        others = {name: coding for name, coding in theirs.items() if kept.get(name) != coding}
        dtypes: dict[str, Any] = {}  # of what is encoded again, none
        if codes is None:
            options = optimizer.masters, optimizer.slot_dtype
            dtypes = {n: dtype_of_slots(each.dtype, *options) for n, each in variables.items()}
        _decode(slots, others, dtypes)
    if codes is not None:
        _encode(slots, codes)
    return {**saved, "slots": slots}


def _decode(slots: Slots, codings: Mapping[str, Any], dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Decodes slots in place: to a variable's type of slots; float32 where that is not known."""
    for name, coding in codings.items():
        scales = slots.pop(scales_name(name), {})
        for of, value in slots.get(name, {}).items():
            array = decoded_array(value, scales.get(of), coding, f'slot "{name}" of "{of}"')
            slots[name][of] = quietly(partial(array.astype, dtypes.get(of, array.dtype)))


def _encode(slots: Slots, codes: SlotCodes) -> None:
    """Encodes those slots in place that hold numbers; what else there is, is left to checks."""
    for name, coding in zip(codes.slots, codes.codings, strict=True):
        for of, value in slots.get(name, {}).items():
            array = np.asarray(value)
            if array.dtype.kind in "fV":
                new = encoded(array, coding)
                slots[name][of] = new.codes
                slots.setdefault(scales_name(name), {})[of] = new.scales
