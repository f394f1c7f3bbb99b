"""Where optimizer state lives: one slot variable per (variable, slot name)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.backends import backend_for, stored
from gpuopt.identity import Identity
from gpuopt.variable import Variable

SlotTable = WeakKeyDictionary[Identity, Variable]


class Slots:
    """Slot variables by slot name and by variable; they go when their variable does.

    Attributes:
        version: Grows whenever slots were made, or may have been replaced.
        waiting: Restored values, by (slot name, variable's name), whose slot is not made yet.
    """

    def __init__(self) -> None:
        self.version = 0
        self._tables: dict[str, SlotTable] = {}
        self.waiting: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def table(self, slot_name: str) -> SlotTable:
        """Returns the slots of one name by the identity of their variable, to read or change."""
        self.version += 1
        return self._tables.setdefault(slot_name, WeakKeyDictionary())

    def get(self, variable: Variable, slot_name: str) -> Variable | None:
        table = self._tables.get(slot_name)
        return None if table is None else table.get(variable.identity)

    def names(self) -> list[str]:
        return sorted(self._tables)

    def in_order_of_creation(self) -> list[str]:
        return list(self._tables)

    def __iter__(self) -> Iterator[Variable]:
        for table in self._tables.values():
            yield from table.values()

    def create(
        self,
        variable: Variable,
        slot_name: str,
        op_name: str,
        value: Any,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> Variable:
        """Makes a slot on the variable's device.

        Args:
            variable: What the slot belongs to.
            slot_name: Its key, as "momentum".
            op_name: The optimizer's name: the slot's own name is `<variable>/<op_name>`, with a
                suffix where that is taken.
            value: What it starts with: a number, or an array of its shape. A restored value that
                waits for this slot takes its place.
            shape: The variable's, if not given.
            dtype: The variable's, if not given.

        Raises:
            ValueError: the waiting value does not fit.
        """
        key = slot_name, variable.name
        restored = self.waiting.get(key)
        if restored is not None:
            check_fits(
                restored,
                f'slot "{slot_name}" of "{variable.name}"',
                variable.shape if shape is None else tuple(shape),
                variable.dtype if dtype is None else np.dtype(dtype),
            )
            value = restored
        slot = new_slot_variable(variable, op_name, value, shape, dtype)
        self.table(slot_name)[variable.identity] = slot
        self.waiting.pop(key, None)
        return slot


def check_fits(
    value: np.ndarray[Any, Any], what: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raises ValueError unless a restored value has the shape and dtype of what it is for."""
    if value.shape != shape:
        raise ValueError(f"{what} has shape {shape}; the saved value has shape {value.shape}")
    if value.dtype != dtype.newbyteorder("="):
        raise ValueError(f"{what} has dtype {dtype}; the saved value has dtype {value.dtype}")


def new_slot_variable(
    variable: Variable,
    op_name: str,
    value: Any,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Variable:
    """Makes an untrainable variable beside `variable`, named `<variable>/<op_name>`."""
    storage = stored(
        value,
        variable.device,
        variable.dtype if dtype is None else dtype,
        variable.shape if shape is None else tuple(shape),
    )
    slot = Variable(storage, name=f"{variable.name}/{op_name}", trainable=False, copy=False)
    backend_for(variable.device).made(slot.identity)
    return slot
