"""The arrays of each slot, made and replaced by its codec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuopt.codecs import Coded
from gpuopt.device import Device
from gpuopt.rules.slot_codes import scales_name
from gpuopt.state.slot_codecs import MASTER, SlotCodecs, decoded_array
from gpuopt.state.state import State, new_slot_variable
from gpuopt.variables.gate import writing
from gpuopt.variables.undo import Undo, all_or_nothing
from gpuopt.variables.variable import Variable

Array = np.ndarray[Any, Any]


class CodedSlot:
    """A slot in 8 bits, as `get_slot` returns it: it reads as float32, and can be assigned to.

    Attributes:
        name: That of the codes.
        codes: uint8, of the variable's shape.
        scales: float32; see `CodedValues`.
        codec: How they store the slot's numbers.
    """

    def __init__(self, codes: Variable, scales: Variable, codec: Coded) -> None:
        self.name = codes.name
        self.codes = codes
        self.scales = scales
        self.codec = codec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.codec.real

    @property
    def device(self) -> Device:
        return self.codes.device

    def numpy(self) -> Array:
        """Returns the numbers that are stored, decoded in host memory."""
        return self.codec.numbers([self.codes.numpy(), self.scales.numpy()])

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
        codes, scales = self.codec.new_arrays(array, by_rows=self.scales.ndim == 2)

        def assign(undo: Undo) -> None:
            undo.assign(self.codes, codes)
            undo.assign(self.scales, scales)

        with writing():
            all_or_nothing(assign)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.numpy().astype(dtype or np.float32, copy=False)

    def __repr__(self) -> str:
        return (
            f'<CodedSlot "{self.name}" shape={self.shape} codec={self.codec} device={self.device}>'
        )


def coded_slot(
    state: State, variable: Variable, slot_name: str, codecs: SlotCodecs
) -> CodedSlot | None:
    """Returns a slot in 8 bits of a variable, or None if it was never made."""
    codes = state.slot(variable, slot_name)
    scales = state.slot(variable, scales_name(slot_name))
    if codes is None or scales is None:
        return None
    return CodedSlot(codes, scales, codecs.coded[slot_name])


def create_slots(
    state: State,
    variables: Sequence[Variable],
    starts: Mapping[str, float],
    shape_of: Callable[[str, tuple[int, ...]], tuple[int, ...]],
    *,
    by_rows: bool = False,
) -> None:
    """Makes the slots that variables lack: from their start, or from restored values.

    Args:
        state: An optimizer's.
        variables: Whose slots they are.
        starts: The initial value of each slot.
        shape_of: Returns a slot's shape, given its variable's.
        by_rows: Whether blocks of codes end at rows. Restored blocks that end there still do.
    """
    described = state.describe()
    codecs = described.slot_codecs
    if by_rows:
        for variable in variables:
            _end_waiting_blocks_at_rows(state, variable.name, codecs)
    for name in codecs.array_names(starts):
        for variable in variables:
            if state.slot(variable, name) is not None:
                continue
            waiting = state.waiting_slots.get((name, variable.name))
            ends = by_rows if waiting is None else waiting.ndim == 2
            shape = shape_of(name, variable.shape)
            form = codecs.form(name, shape, variable.dtype, starts, by_rows=ends)
            op_name = described.op_name(name)
            state.create_slot(variable, name, op_name, form.start, form.shape, form.dtype)


def create_master(state: State, variable: Variable) -> None:
    """Makes the master copy that a variable lacks, or takes the one that waits for it."""
    if state.slot(variable, MASTER) is None:
        op_name = state.describe().op_name(MASTER)
        float32 = np.dtype(np.float32)
        state.create_slot(variable, MASTER, op_name, variable.storage, variable.shape, float32)


def master_or_own(state: State, variable: Variable) -> Variable:
    """Returns a variable's master copy; the variable itself where there is none."""
    master = state.slot(variable, MASTER)
    return variable if master is None else master


def _end_waiting_blocks_at_rows(state: State, name: str, codecs: SlotCodecs) -> None:
    for slot_name, codec in codecs.coded.items():
        keys = (slot_name, name), (scales_name(slot_name), name)
        codes, scales = (state.waiting_slots.get(key) for key in keys)
        if scales is not None and scales.ndim == 1:
            what = f'slot "{slot_name}" of "{name}"'
            numbers = decoded_array(codes, scales, codec.name, what)
            state.waiting_slots.update(
                zip(keys, codec.new_arrays(numbers, by_rows=True), strict=True)
            )


def end_blocks_at_rows(state: State, variable: Variable, codecs: SlotCodecs) -> None:
    """Encodes a variable's slots anew where their blocks have parts of several rows."""
    with writing(), state.lock:
        new: list[tuple[str, Array]] = []
        for name, codec in codecs.coded.items():
            slot = coded_slot(state, variable, name, codecs)
            if slot is None or slot.scales.ndim == 2:
                continue
            arrays = codec.new_arrays(slot.numpy(), by_rows=True)
            new += zip((name, scales_name(name)), arrays, strict=True)
        replace_arrays(state, variable, new, codecs)


def replace_arrays(
    state: State, variable: Variable, arrays: Sequence[tuple[str, Array]], codecs: SlotCodecs
) -> None:
    """Puts arrays in the place of those of a variable's slots, by name; all or none."""
    op_name = state.describe().op_name
    made = []
    for name, array in arrays:
        start = codecs.form(name, variable.shape, variable.dtype).start
        given = op_name(name), array, start, array.shape, array.dtype
        made.append((name, new_slot_variable(variable, *given)))
    for name, slot in made:
        state.table(name)[variable.identity] = slot
