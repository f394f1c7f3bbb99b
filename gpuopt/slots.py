"""Where optimizer state lives: one slot variable per (variable, slot name)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from gpuopt.backends import backend_for
from gpuopt.identity import Identity
from gpuopt.variable import Variable

SlotTable = WeakKeyDictionary[Identity, Variable]


class Slots:
    """Slot variables by slot name and by variable; they go when their variable does.

    Attributes:
        version: Grows whenever slots were made, or may have been replaced.
    """

    def __init__(self) -> None:
        self.version = 0
        self._tables: dict[str, SlotTable] = {}

    def table(self, slot_name: str) -> SlotTable:
        """Returns the slots of one name by the identity of their variable, to read or change."""
        self.version += 1
        return self._tables.setdefault(slot_name, WeakKeyDictionary())

    def get(self, variable: Variable, slot_name: str) -> Variable | None:
        table = self._tables.get(slot_name)
        return None if table is None else table.get(variable.identity)

    def names(self) -> list[str]:
        return sorted(self._tables)

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
            value: What it starts with: a number, or an array of its shape.
            shape: The variable's, if not given.
            dtype: The variable's, if not given.
        """
        slot = new_slot_variable(variable, op_name, value, shape, dtype)
        self.table(slot_name)[variable.identity] = slot
        return slot


def new_slot_variable(
    variable: Variable,
    op_name: str,
    value: Any,
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
) -> Variable:
    """Makes an untrainable variable beside `variable`, named `<variable>/<op_name>`."""
    storage = backend_for(variable.device).full(
        variable.shape if shape is None else tuple(shape),
        variable.dtype if dtype is None else dtype,
        value,
    )
    return Variable(storage, name=f"{variable.name}/{op_name}", trainable=False, copy=False)
