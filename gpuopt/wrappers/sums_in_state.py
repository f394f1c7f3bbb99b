"""Accumulated gradients in the state of the inner optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.device import Device
from gpuopt.state.accumulated import COUNT, ROWS, SUM, UNIQUE, VALUES
from gpuopt.state.host_scalar import HostScalar
from gpuopt.state.state import Range, State, check_fits, new_slot_variable
from gpuopt.state.state_dict import arrays_with_paths, owners_of_slots
from gpuopt.step.wide_gradients import wide_dtype
from gpuopt.variables.copied import Copied
from gpuopt.variables.identity import Identity
from gpuopt.variables.operators import reading
from gpuopt.variables.row_changes import register
from gpuopt.variables.undo import Undo
from gpuopt.variables.variable import Variable, global_variables

Array = Any

# What sparse gradients are laid out as.
_OF_SLICES = (VALUES, ROWS, UNIQUE)
# Any more are not counted one by one in float64.
_MOST_STEPS = 2.0**53


class KeptSum:
    """What one variable's gradients add up to so far.

    Attributes:
        is_dense: Whether its slot holds a sum.
        slices: (values, rows) of sparse gradients: copies, in the order of `last_update`.
        last_update: See `Updated`.
        num_unique: How many rows the first of these has, if they are the sum of others.
    """

    def __init__(self, variable: Variable | None) -> None:
        """Begins without gradients.

        Args:
            variable: The variable; None if it is not known since a restore.
        """
        self.is_dense = False
        self.slices: list[tuple[Array, Array]] = []
        self.last_update: Any = None
        self.num_unique = 0
        self.note(variable)

    def note(self, variable: Variable | None) -> None:
        """Remembers the variable, and keeps none alive but those that are made of raw arrays."""
        self._raw = variable if variable is not None and variable.is_raw_array else None
        self._reference = None if variable is None else weakref.ref(variable)

    @property
    def variable(self) -> Variable | None:
        return None if self._reference is None else self._reference()

    @property
    def num_rows(self) -> int:
        return sum(len(rows) for _, rows in self.slices)

    def joined(self, variable: Variable) -> tuple[Array, Array]:
        """Returns the values and rows of all sparse gradients, one after the other."""
        backend = backend_for(variable.device)
        parts = [array for each in self.slices for array in each]
        with backend.enter_reading(self, kept=parts):
            if len(self.slices) == 1:
                return self.slices[0]
            values, rows = zip(*self.slices, strict=True)
            return backend.xp.concatenate(values), backend.xp.concatenate(rows)


def _rows_outside(rows: Array, variable: Variable) -> Array:
    return rows[(rows < 0) | (rows >= variable.shape[0])]


def refuse_rows_outside(rows: Array, variable: Variable) -> None:
    """Raises IndexError if a row of a kept gradient is none of its variable's; waits for a GPU."""
    host = backend_for(variable.device).to_host(rows)
    outside = _rows_outside(host, variable)
    if outside.size:
        raise IndexError(
            f'a gradient for "{variable.name}" that is accumulated has the row {outside[0]}, which '
            f"is not in [0, {variable.shape[0]}), the variable's rows. {variable.device} has not "
            "looked at it before: reset() of the GradientAccumulationOptimizer drops what is "
            "accumulated"
        )


class SumsInState:
    """The sums of one optimizer, from step to step and in what is saved.

    Attributes:
        is_spread: Whether other processes have sums of their own, which no file has.

    All but `num_steps` is called inside `writing`. A dense sum is a slot, of float32 for variables
    of 16 bits. The sums of sparse gradients are the gradients themselves, and become slots where
    the state is read. See `WrapperState`.
    """

    slot_names: Sequence[str] = (SUM, ROWS, VALUES, UNIQUE)
    others: Mapping[str, Range] = {COUNT: Range(0.0, _MOST_STEPS, np.int64)}

    def __init__(self, optimizer: Any) -> None:
        """Begins without gradients, or with those that its state has.

        Args:
            optimizer: In whose state the sums are.
        """
        # Not by itself: its state has these sums.
        self._reference = weakref.ref(optimizer)
        self._sums: WeakKeyDictionary[Identity, KeptSum] = WeakKeyDictionary()
        self._is_restored = True
        self.is_spread = False
        register(self)

    @property
    def num_steps(self) -> int:
        """How many steps' gradients are summed."""
        count = self._state.other(COUNT)
        waiting = self._state.waiting_others.get(COUNT, 0)
        return int(waiting if count is None else count.numpy())

    def owners(self) -> dict[str, Copied]:
        """Returns the variables and arrays that have slots or sums, by name; see `to_copy`."""
        return owners_of_slots(self._state, list(self._sums))

    def reset(self) -> None:
        """Forgets what is summed."""
        self._state.settle_expected()  # a copy's, which would keep slots alive that are forgotten
        self._sums.clear()
        self._is_restored = self.is_spread = False
        for key in [key for key in self._state.waiting_slots if key[0] in self.slot_names]:
            del self._state.waiting_slots[key]
        self._forget_slots(*_OF_SLICES)
        self._state.waiting_others.pop(COUNT, None)
        count = self._state.other(COUNT)
        if count is not None:
            count.assign(0)

    def spread(self) -> None:
        """Notes that other processes add gradients of the same steps to sums of their own.

        Raises:
            RuntimeError: what is summed is of one process alone.
        """
        if self.num_steps and not self.is_spread:
            raise RuntimeError(
                f'what "{self._optimizer.get_name()}" has accumulated was restored, or begun '
                "outside of MirroredStrategy.run: all processes would bring it to their sums. Call "
                "reset() before"
            )
        self.is_spread = True

    # What a state asks: see `WrapperState`.

    @contextmanager
    def lay_out(self) -> Iterator[None]:
        if self.is_spread and self.num_steps:
            raise RuntimeError(
                f'the state of "{self._optimizer.get_name()}" cannot be read while it accumulates '
                "gradients in several processes, for each has a part of their sums: save after an "
                "update, which apply_accumulated() makes"
            )
        laid: list[tuple[str, Identity]] = []
        try:
            for identity, found in list(self._sums.items()):
                if found.slices and found.variable is not None and self.num_steps:
                    arrays = dict(zip((VALUES, ROWS), found.joined(found.variable), strict=True))
                    refuse_rows_outside(arrays[ROWS], found.variable)
                    if found.num_unique:
                        arrays[UNIQUE] = np.array(found.num_unique)
                    for slot_name, array in arrays.items():
                        slot = new_slot_variable(
                            found.variable, slot_name, array, None, array.shape, array.dtype
                        )
                        self._state.table(slot_name)[identity] = slot
                        laid.append((slot_name, identity))
            yield
        finally:
            for slot_name, identity in laid:
                del self._state.table(slot_name)[identity]

    def is_stale(self, slot_name: str, identity: Identity) -> bool:
        if slot_name != SUM or self._is_restored:
            return False
        found = self._sums.get(identity)
        return found is None or not found.is_dense or not self.num_steps

    def check(self, slots: Mapping[str, Array], variable: Variable, name: str) -> None:
        wide = wide_dtype(variable)
        total, rows, values, unique = (slots.get(slot_name) for slot_name in self.slot_names)
        if total is not None:
            check_fits(total, f'slot "{SUM}" of "{name}"', variable.shape, wide)
        if rows is None and values is None and unique is None:
            return
        if rows is None or values is None or total is not None or not variable.ndim:
            raise ValueError(
                f'"{name}" has the slots {list(slots)}; of a variable with rows there is either '
                f'"{SUM}", or "{ROWS}" and "{VALUES}"'
            )
        num_rows = len(values) if values.ndim else 0
        check_fits(values, f'slot "{VALUES}" of "{name}"', (num_rows, *variable.shape[1:]), wide)
        what = f'slot "{ROWS}" of "{name}"'
        check_fits(rows, what, (num_rows,), np.dtype(np.int64))
        if unique is not None:
            counted = f'slot "{UNIQUE}" of "{name}"'
            check_fits(unique, counted, (), np.dtype(np.int64))
            if not 0 <= unique <= num_rows:
                raise ValueError(f"{counted} is {unique}, of {num_rows} rows")
        outside = _rows_outside(rows, variable)
        if outside.size:
            raise ValueError(
                f"{what} holds {outside[0]}, which is not in [0, {variable.shape[0]}), the "
                "variable's rows"
            )

    def keep(self, undo: Undo) -> None:
        sums, flags = dict(self._sums), (self._is_restored, self.is_spread)

        def put_back() -> None:
            self._sums = WeakKeyDictionary(sums)
            self._is_restored, self.is_spread = flags

        undo.on_error("sums of gradients", put_back)
        count = self._state.other(COUNT)
        if count is not None:
            undo.keep(count)

    def forget_all(self) -> None:
        self._forget_slots(*self.slot_names)
        self.reset()
        self._is_restored = True

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        for variable in variables:
            found = self._sums.get(variable.identity)
            has_slices = found is not None and bool(found.slices)
            if self._reference() is not None:  # restored ones are slots until the next call
                has_slices |= self._state.slot(variable, ROWS) is not None
            if has_slices and self.num_steps:
                raise ValueError(
                    f'the rows of "{variable.name}" stay as they are while sparse gradients of it '
                    "are accumulated: call apply_accumulated() or reset() of the "
                    "GradientAccumulationOptimizer first"
                )

    # What arithmetic asks.

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "who adds gradients holds it"
        return optimizer

    @property
    def _state(self) -> State:
        return self._optimizer.state  # type: ignore[no-any-return]

    def _counter(self) -> HostScalar:
        return self._state.create_host_scalar(COUNT, np.int64(0), Device.cpu)

    def _forget_slots(self, *slot_names: str) -> None:
        for slot_name in set(slot_names).intersection(self._state.slot_names()):
            table = self._state.table(slot_name)
            for identity in list(table):
                del table[identity]

    def _begin(self) -> None:
        """Takes over what was restored; drops what an update that was undone has left."""
        self._state.settle_expected()
        if not self.num_steps:
            self._sums.clear()
        elif self._is_restored:
            every = [*arrays_with_paths(self._state), *global_variables()]
            variables = {each.identity: each for each in every}
            for slot_name in (SUM, ROWS):
                for identity in list(self._state.table(slot_name)):
                    found = self._sums.setdefault(identity, KeptSum(variables.get(identity)))
                    if slot_name == SUM:
                        found.is_dense = True
                    elif found.variable is not None:
                        self._take_slices(found.variable, found)
        self._is_restored = False

    def _take_all_restored(self) -> None:
        """Takes over what waits for variables that were made since the state was restored."""
        waiting = {name for key, name in self._state.waiting_slots if key in self.slot_names}
        for variable in global_variables() if waiting else ():
            if variable.name in waiting:
                found = self._sums.setdefault(variable.identity, KeptSum(variable))
                self._take_restored(variable, found)

    def _take_restored(self, variable: Variable, found: KeptSum) -> None:
        """Takes over what waits for a variable that was not there when the state was restored."""
        waiting = {
            slot_name: self._state.waiting_slots[slot_name, variable.name]
            for slot_name in self.slot_names
            if (slot_name, variable.name) in self._state.waiting_slots
        }
        self.check(waiting, variable, variable.name)
        for slot_name, value in waiting.items():
            self._state.create_slot(variable, slot_name, slot_name, value, value.shape, value.dtype)
        found.is_dense |= SUM in waiting
        self._take_slices(variable, found)

    def _take_slices(self, variable: Variable, found: KeptSum) -> None:
        """Takes restored slices out of the state."""
        values, rows, unique = (self._state.slot(variable, name) for name in _OF_SLICES)
        if values is None or rows is None:
            return
        for slot_name in _OF_SLICES:
            self._state.table(slot_name).pop(variable.identity, None)
        found.num_unique = 0 if unique is None else int(unique.numpy())
        with reading(values, rows):
            found.slices = [(values.storage, rows.storage)]
            backend_for(variable.device).record_creation(found)

    def _total(self, variable: Variable) -> Variable:
        """Returns the slot of a variable's dense sum."""
        total = self._state.slot(variable, SUM)
        if total is None:
            dtype = wide_dtype(variable)
            total = self._state.create_slot(variable, SUM, SUM, 0.0, None, dtype)
        return total
