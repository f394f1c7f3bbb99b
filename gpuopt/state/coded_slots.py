"""Slots in 8 bits: two variables for each, one of codes and one of scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.device import Device
from gpuopt.rules.slot_codes import (
    CodedValues,
    Coding,
    SlotCodes,
    decoded,
    encoded,
    scales_name,
    scales_shape,
)
from gpuopt.state.state import State, new_slot_variable
from gpuopt.variables.gate import writing
from gpuopt.variables.storage import describe
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.variable import Variable

Array = np.ndarray[Any, Any]


class CodedSlot:
    """A slot in 8 bits, as `get_slot` returns it: it reads as float32, and can be assigned to.

    Attributes:
        name: That of the codes.
        codes: uint8, of the variable's shape.
        scales: float32; see `CodedValues`.
        coding: What the codes stand for.
    """

    def __init__(self, codes: Variable, scales: Variable, coding: Coding) -> None:
        self.name = codes.name
        self.codes = codes
        self.scales = scales
        self.coding = coding

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    @property
    def device(self) -> Device:
        return self.codes.device

    def numpy(self) -> Array:
        """Returns the numbers that are stored, decoded in host memory."""
        return decoded(CodedValues(self.codes.numpy(), self.scales.numpy()), self.coding)

    def assign(self, value: Any) -> CodedSlot:
        """Stores the codes that are nearest to other numbers; those not finite become 0.

        Args:
            value: Of the slot's shape, in host memory.

        Raises:
            ValueError: `value` has another shape.
        """
        array = np.asarray(value)
        if array.shape != self.shape:
            raise ValueError(
                f'"{self.name}" has shape {self.shape}; the value has shape {array.shape}'
            )
        new = encoded(array, self.coding, by_rows=self.scales.ndim == 2)

        def assign(undo: Undo) -> None:
            undo.assign(self.codes, new.codes)
            undo.assign(self.scales, new.scales)

        with writing():
            all_or_nothing(assign)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.numpy().astype(dtype or np.float32, copy=False)

    def __repr__(self) -> str:
        return (
            f'<CodedSlot "{self.name}" shape={self.shape} coding={self.coding.name} '
            f"device={self.device}>"
        )


def coded_slot(
    state: State, variable: Variable, slot_name: str, codes: SlotCodes
) -> CodedSlot | None:
    """Returns a slot of a variable, or None if it was never made."""
    of_numbers = state.slot(variable, slot_name)
    of_scales = state.slot(variable, scales_name(slot_name))
    if of_numbers is None or of_scales is None:
        return None
    coding = codes.stored[slot_name]
    assert coding is not None, "it is no slot of scales"
    return CodedSlot(of_numbers, of_scales, coding)


def check_coded_variables(variables: Sequence[Variable]) -> None:
    """Raises TypeError for variables that would lose more than 8-bit slots save."""
    for variable in variables:
        if variable.dtype == np.float64:
            raise TypeError(
                f'slot_bits=8: "{variable.name}" is float64, and its slots would have two digits: '
                "use float32, or an optimizer with slot_bits=32 for it"
            )


def create_coded_slots(
    state: State, variable: Variable, codes: SlotCodes, *, by_rows: bool = False
) -> None:
    """Makes the slots that a variable lacks: with zeros, or with values that wait for them.

    Args:
        state: An optimizer's.
        variable: Whose slots they are.
        codes: How they are stored.
        by_rows: Whether blocks end at rows. Those of values that wait may, in any case.
    """
    op_name = state.describe().op_name
    if by_rows:
        _end_waiting_blocks_at_rows(state, variable.name, codes)
    for name, coding in codes.stored.items():
        if state.slot(variable, name) is not None:
            continue
        if coding is None:
            waiting = state.waiting_slots.get((name, variable.name))
            ends = by_rows if waiting is None else waiting.ndim == 2 and variable.ndim > 0
            shape = scales_shape(variable.shape, by_rows=ends)
            state.create_slot(variable, name, op_name(name), 0.0, shape, np.float32)
        else:
            state.create_slot(variable, name, op_name(name), coding.zero, dtype=np.uint8)


def _end_waiting_blocks_at_rows(state: State, name: str, slot_codes: SlotCodes) -> None:
    for slot_name, coding in zip(slot_codes.slots, slot_codes.codings, strict=True):
        keys = (slot_name, name), (scales_name(slot_name), name)
        codes, scales = (state.waiting_slots.get(key) for key in keys)
        if scales is not None and scales.ndim == 1:
            what = f'slot "{slot_name}" of "{name}"'
            numbers = decoded_array(codes, scales, coding.name.lower(), what)
            new = encoded(numbers, coding, by_rows=True)
            state.waiting_slots.update(zip(keys, new, strict=True))


def end_blocks_at_rows(state: State, variable: Variable, codes: SlotCodes) -> None:
    """Encodes a variable's slots anew where their blocks have parts of several rows."""
    with writing(), state.lock:
        op_name = state.describe().op_name
        new: list[tuple[str, Variable]] = []
        for name in codes.slots:
            slot = coded_slot(state, variable, name, codes)
            if slot is None or slot.scales.ndim == 2:
                continue
            values = encoded(slot.numpy(), slot.coding, by_rows=True)
            firsts = float(slot.coding.zero), 0.0
            for stored, value, first in zip((name, scales_name(name)), values, firsts, strict=True):
                given = op_name(stored), value, first, value.shape, value.dtype
                new.append((stored, new_slot_variable(variable, *given)))
        for stored, each in new:
            state.table(stored)[variable.identity] = each


def replace_scales(state: State, variable: Variable, slot_name: str, value: Array) -> None:
    """Puts scales of other blocks in the place of a variable's slot of them."""
    op_name = state.describe().op_name(slot_name)
    new = new_slot_variable(variable, op_name, value, 0.0, value.shape, value.dtype)
    state.table(slot_name)[variable.identity] = new


def stored_shape(
    codes: SlotCodes, slot_name: str, shape: tuple[int, ...], value: Array
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns the shape and dtype that a saved value must have to be what is stored of a slot.

    Args:
        codes: How the optimizer stores slots.
        slot_name: One of `codes.stored`.
        shape: The variable's.
        value: The saved value. Its blocks may end at rows.
    """
    if codes.stored[slot_name] is not None:
        return shape, np.dtype(np.uint8)
    by_rows = value.ndim == 2 and len(shape) > 0
    return scales_shape(shape, by_rows=by_rows), np.dtype(np.float32)


def decoded_array(codes: Any, scales: Any, coding: str, what: str) -> Array:
    """Returns the numbers of a saved slot.

    Raises:
        ValueError: what is saved is no slot in 8 bits.
    """
    known = {each.name.lower(): each for each in Coding}
    of_numbers, of_scales = np.asarray(codes), np.asarray(scales)
    shapes = [scales_shape(of_numbers.shape, by_rows=False)]
    if of_numbers.ndim:
        shapes.append(scales_shape(of_numbers.shape, by_rows=True))
    is_right = (
        coding in known
        and of_numbers.dtype == np.uint8
        and of_scales.dtype == np.float32
        and of_scales.shape in shapes
    )
    if not is_right:
        raise ValueError(
            f"{what} is saved in 8 bits as {coding!r}, of one of {sorted(known)}: codes of uint8 "
            f"with scales of float32 {shapes[0]}; it has codes {describe(codes)} and scales "
            f"{describe(scales)}"
        )
    return decoded(CodedValues(of_numbers, of_scales), known[coding])
