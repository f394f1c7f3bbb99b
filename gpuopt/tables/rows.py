"""Rows: rows of a variable that come and go, with all their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np

from gpuopt.backends import backend_for, refuse_masked, to_device
from gpuopt.backends.backend import RowCopy
from gpuopt.device import Device
from gpuopt.optimizer import living_optimizers
from gpuopt.step.replica_context import replica_context
from gpuopt.tables.changes import Changed, appended, kept, with_state_reset
from gpuopt.tables.dependents import Table, make_waiting_slots, table_of
from gpuopt.variables import recording
from gpuopt.variables.gate import between_writes
from gpuopt.variables.late_errors import raise_late_errors
from gpuopt.variables.operators import reading, storage_of
from gpuopt.variables.row_changes import forget_plans, refuse_row_changes, replace_arrays
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable, checked_rows

# What prepares that, for a table of the variable of this number.
_Prepare = Callable[[Table, int], Changed]


class Rows:
    """The rows of a variable, to be kept, removed, appended or reset together with their state.

    A variable's rows are its entries along the first dimension. Together with them go those of its
    slots under all living optimizers, and of its moving averages; scalars, as Adam's powers of beta
    or the global step, stay as they are. Names and identities stay, so checkpoints, optimizers and
    losses go on with the variable.

    A call waits for running steps and saves of other threads, and happens between two of them. It
    changes everything or nothing: an error, also one for lack of memory, leaves all as it was. The
    variable, its slots and averages get new arrays (other than by `reset`); memory holds both for a
    moment. A GPU copies all of them in one launch, in order with the work on its streams; the host
    reads the row numbers, and the results of checks of sparse gradients that are in flight.

    Of several variables, the same rows come and go in one call, as if they were columns of one.
    Where a method takes values, they are then a list, for each variable its own.

    Arrays that were read before keep the old rows. So does an array that the variable has adopted
    (`copy=False`): the variable then has memory of its own. Gradients and checkpoints that were
    made before are refused if the number of rows is another.

    Every method raises, before anything is written:

        ValueError: The shape of a slot does not say which row its parts belong to; the memory is
            another variable's, too, or a raw array's that was updated; other copies of it would
            keep their rows: it is one copy of a `MirroredVariable`, an elastic or model average's
            variable or center, or trained by the workers of an open `SyncReplicasOptimizer`.
            Of several variables, one has more rows than another, or gets more.
        RuntimeError: This thread is in the middle of a step, a save or a loss, or is one of several
            replicas, or captures a CUDA graph.
        IndexError: A row is not in the variable; or an earlier step on its GPU had such a row.
        TypeError: Rows are neither integers nor bool, or values have a wrong type, or are no list
            for several variables.
        DeadlineExceededError: Another thread does not end its step, its save or its restore.
    """

    def __init__(self, variables: Any) -> None:
        """See `rows`."""
        self._is_list = isinstance(variables, list | tuple)
        listed = variables if self._is_list else [variables]
        # The copies of each variable: only a mirrored one has several.
        self._copies = [getattr(each, "replicas", (each,)) for each in listed]
        self._all: list[Variable] = []
        for each in chain.from_iterable(self._copies):
            if not isinstance(each, Variable):
                raise TypeError(
                    f"rows come and go in a gpuopt.Variable, got {describe(each)}: make one of "
                    "an array, by gpuopt.Variable(array)"
                )
            if each.has_owner:
                raise ValueError(
                    f'"{each.name}" is a slot or an average: its rows come and go with those of '
                    "its variable"
                )
            if each.ndim == 0:
                raise ValueError(f'"{each.name}" is a scalar, which has no rows')
            if each in self._all:
                raise ValueError(f'"{each.name}" is listed twice among those whose rows change')
            self._all.append(each)
        if not listed:
            raise ValueError("the list of variables whose rows change is empty")
        self._names = ", ".join(f'"{copies[0].name}"' for copies in self._copies)

    def keep(self, rows: Any) -> None:
        """Keeps some rows, in the given order, and drops all others.

        Args:
            rows: Row numbers, a vector of integers in which one may come several times; or a mask,
                a vector of bool for all rows. On any device.
        """
        numbers = self._reader(rows, "keep")
        self._change(lambda table, _: kept(table, numbers(table)))

    def remove(self, rows: Any) -> None:
        """Drops some rows; the others keep their order.

        Args:
            rows: As in `keep`.
        """
        numbers = self._reader(rows, "remove")

        def remove(table: Table, _: int) -> Changed:
            is_left = np.ones(table.variable.shape[0], bool)
            is_left[numbers(table)] = False
            return kept(table, np.flatnonzero(is_left))

        self._change(remove)

    def append(self, values: Any, *, state_of: Any = None) -> None:
        """Adds rows at the end.

        Args:
            values: [num_rows, ...], the new rows; of several variables, a list of these.
            state_of: The rows, as in `keep`, whose slots and averages the new rows get, one for
                each. By default, slots start as they do for a new variable, with Adagrad's
                `initial_accumulator_value`, say; and averages with the new values.

        Raises:
            ValueError: It is not known what a slot starts with, for want of a number: pass
                `state_of`, or override `_new_slot_rows` of the optimizer.
        """
        of_each = self._of_each(values)
        numbers = self._reader(state_of, "copy the state of")
        added: dict[int, str] = {}

        def append(table: Table, position: int) -> Changed:
            new = checked_rows(table.variable, of_each[position], None)
            added.setdefault(len(new), table.variable.name)
            _refuse_uneven(added, "would get")
            if state_of is None:
                return appended(table, new, None)
            rows = numbers(table)
            if len(rows) != len(new):
                raise ValueError(
                    f"{len(new)} rows are appended to {self._names}, with the state of "
                    f"{len(rows)}; there must be one for each"
                )
            return appended(table, new, rows)

        self._change(append)

    def reset(self, rows: Any, values: Any = None) -> None:
        """Has the state of some rows start again, in place.

        Args:
            rows: As in `keep`; no row twice if there are `values`.
            values: [num_rows, ...], what the rows become, in the order of `rows`; of several
                variables, a list of these. By default they stay.

        Raises:
            ValueError: As `append`.
        """
        of_each = None if values is None else self._of_each(values)
        numbers = self._reader(rows, "reset")

        def reset(table: Table, position: int) -> Changed:
            given = numbers(table)
            once = np.unique(given)
            if of_each is None:
                return with_state_reset(table, once, None)
            new = checked_rows(table.variable, of_each[position], len(given))
            if len(once) < len(given):
                raise ValueError(
                    f"rows of {self._names} to reset: a row that comes twice cannot get two values"
                )
            return with_state_reset(table, given, new)

        self._change(reset)

    def _reader(self, rows: Any, verb: str) -> Callable[[Table], np.ndarray[Any, Any]]:
        """Returns what reads row numbers when it is first called with one of the tables."""
        read: list[np.ndarray[Any, Any]] = []

        def numbers(table: Table) -> np.ndarray[Any, Any]:
            if not read:
                what = f"rows of {self._names} to {verb}"
                read.append(_row_numbers(rows, table.variable.shape[0], what))
            return read[0]

        return numbers

    def _of_each(self, values: Any) -> Sequence[Any]:
        """Returns the values for each variable."""
        if not self._is_list:
            return [values]
        if not isinstance(values, list | tuple) or len(values) != len(self._copies):
            raise TypeError(
                f"values for rows of {self._names} must be a list of {len(self._copies)}, one for "
                f"each, got {describe(values)}"
            )
        return values

    def _change(self, prepare: _Prepare) -> None:
        """Changes all copies, between two steps.

        Args:
            prepare: Called for each copy inside `enter_update` of all that hangs on it: checks the
                arguments, and writes nothing yet.
        """
        if recording.depth():
            raise RuntimeError(
                f"rows of {self._names} cannot come or go in a loss that is being recorded: its "
                "gradient would have the shape of the rows before"
            )
        context = replica_context()
        has_copies = len(self._all) > len(self._copies)
        if context.strategy and not context.is_cross_replica and has_copies:
            raise RuntimeError(
                f"rows of {self._names} cannot come or go in a replica: each other one would "
                "change all copies again. Change them once, between two calls of strategy.run"
            )
        purpose = f"changing the rows of {self._names}"
        # User code among the values, or a signal handler, would write to arrays copied already.
        with between_writes(purpose, writes=True, admits_steps=False):
            for each in self._all:
                make_waiting_slots(each)
            prepared: dict[Device, list[RowCopy]] = {each.device: [] for each in self._all}
            for device in prepared:
                raise_late_errors(device)
            refuse_row_changes(self._all)
            _refuse_uneven({each.shape[0]: each.name for each in self._all}, "has")
            tables = [(i, table_of(each)) for i, own in enumerate(self._copies) for each in own]
            replaced: list[tuple[Variable, Any]] = []
            with ExitStack() as updates:
                for position, table in tables:
                    device = table.variable.device
                    used: list[Any] = [[each.storage for each in table.variables()]]
                    update = backend_for(device).enter_update(*table.identities(), kept=used)
                    updates.enter_context(update)
                    copies, new = prepare(table, position)
                    used += copies
                    prepared[device] += copies
                    replaced += new
                # Only now is anything written, by `reset` to the arrays that are in use.
                for device, copies in prepared.items():
                    backend_for(device).copy_rows(copies)
            identities = {variable.identity for variable, _ in replaced}
            for optimizer in living_optimizers() if replaced else ():
                optimizer.forget_plans(identities)
            forget_plans(identities)
            replace_arrays(replaced)


def rows(variables: Any) -> Rows:
    """Returns what changes the rows of a variable, or the same rows of several.

        gpuopt.rows(table).append(new_values)
        gpuopt.rows([means, scales, colors]).remove(opacity < 0.005)

    Args:
        variables: A Variable of one dimension or more, not a slot or an average; or a
            `MirroredVariable`, all of whose copies change, in each process by the same call. Or a
            list of such, that have equally many rows.

    Raises:
        TypeError: One is something else, as a raw array.
        ValueError: One is a scalar, a slot or an average, or is listed twice, or none is listed.
    """
    return Rows(variables)


def _refuse_uneven(names: Mapping[int, str], verb: str) -> None:
    """Refuses variables with other numbers of rows, given a name for each number."""
    if len(names) > 1:
        (one, first), (other, second), *_ = names.items()
        raise ValueError(
            f'"{first}" {verb} {one} rows, and "{second}" {other}: rows come and go together in '
            "variables that have equally many"
        )


def _row_numbers(rows: Any, height: int, what: str) -> np.ndarray[Any, Any]:
    """Returns the numbers of rows, int64, in host memory, for which the host waits.

    Args:
        rows: Numbers in any order, or [height] bool; on any device, a Variable, or a list.
        height: How many rows there are.
        what: What the rows are, for errors.

    Raises:
        TypeError: `rows` holds something else than integers or bool, or is masked.
        ValueError: it is no vector, or a mask of another length.
        IndexError: there is no such row.
    """
    refuse_masked(storage_of(rows), what)
    with reading(rows):
        given = storage_of(rows)
        array = np.asarray(to_device(given, Device.cpu) if hasattr(given, "dtype") else given)
    if array.ndim != 1:
        raise ValueError(f"{what} must be a vector, got shape {array.shape}")
    if array.dtype == bool:
        if array.size != height:
            raise ValueError(
                f"{what} are given by a mask of {array.size} elements for {height} rows; it must "
                "have one for each"
            )
        return np.flatnonzero(array)
    if array.size == 0 and not hasattr(given, "dtype"):
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, or a mask of bool, got dtype {array.dtype}")
    outside = (array < 0) | (array >= height)
    if outside.any():
        offset = int(outside.argmax())
        raise IndexError(f"{what}: [{offset}] = {array[offset]} is not in [0, {height})")
    return array.astype(np.int64)
