"""Rows: rows of a variable that come and go, with all their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import RowCopy
from gpuopt.optimizer import living_optimizers
from gpuopt.step.replica_context import replica_context
from gpuopt.tables.dependents import Dependent, Table, make_waiting_slots, table_of
from gpuopt.tables.row_numbers import row_numbers
from gpuopt.variables import recording
from gpuopt.variables.gate import between_writes
from gpuopt.variables.late_errors import raise_late_errors
from gpuopt.variables.operands import checked_rows
from gpuopt.variables.row_changes import refuse_row_changes, replace_arrays
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import Variable

# What happens to a table: copies, and the variables that get other arrays by them.
_Changed = tuple[list[RowCopy], list[tuple[Variable, Any]]]


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

    Arrays that were read before keep the old rows. So does an array that the variable has adopted
    (`copy=False`): the variable then has memory of its own. Gradients and checkpoints that were
    made before are refused if the number of rows is another.

    Every method raises, before anything is written:

        ValueError: The shape of a slot does not say which row its parts belong to; the memory is
            another variable's, too, or a raw array's that was updated; other copies of it would
            keep their rows: it is one copy of a `MirroredVariable`, an elastic or model average's
            variable or center, or trained by the workers of an open `SyncReplicasOptimizer`.
        RuntimeError: This thread is in the middle of a step, a save or a loss, or is one of several
            replicas, or captures a CUDA graph.
        IndexError: A row is not in the variable; or an earlier step on its GPU had such a row.
        TypeError: Rows are neither integers nor bool, or values have a wrong type.
        DeadlineExceededError: Another thread does not end its step, its save or its restore.
    """

    def __init__(self, variable: Any) -> None:
        """See `rows`."""
        copies = getattr(variable, "replicas", (variable,))
        for each in copies:
            if not isinstance(each, Variable):
                raise TypeError(
                    f"rows come and go in a gpuopt.Variable, got {describe(variable)}: make one of "
                    "an array, by gpuopt.Variable(array)"
                )
            if each.is_beside_another:
                raise ValueError(
                    f'"{each.name}" is a slot or an average: its rows come and go with those of '
                    "its variable"
                )
            if each.ndim == 0:
                raise ValueError(f'"{each.name}" is a scalar, which has no rows')
        self._copies: Sequence[Variable] = copies
        self._name = copies[0].name

    def keep(self, rows: Any) -> None:
        """Keeps some rows, in the given order, and drops all others.

        Args:
            rows: Row numbers, a vector of integers in which one may come several times; or a mask,
                a vector of bool for all rows. On any device.
        """
        self._change(lambda table: _kept(table, self._numbers(rows, "keep", table)))

    def remove(self, rows: Any) -> None:
        """Drops some rows; the others keep their order.

        Args:
            rows: As in `keep`.
        """

        def remove(table: Table) -> _Changed:
            is_left = np.ones(table.variable.shape[0], bool)
            is_left[self._numbers(rows, "remove", table)] = False
            return _kept(table, np.flatnonzero(is_left))

        self._change(remove)

    def append(self, values: Any, *, state_of: Any = None) -> None:
        """Adds rows at the end.

        Args:
            values: [num_rows, ...], the new rows.
            state_of: The rows, as in `keep`, whose slots and averages the new rows get, one for
                each. By default, slots start as they do for a new variable, with Adagrad's
                `initial_accumulator_value`, say; and averages with the new values.

        Raises:
            ValueError: It is not known what a slot starts with, for want of a number: pass
                `state_of`, or override `_new_slot_rows` of the optimizer.
        """

        def append(table: Table) -> _Changed:
            new = checked_rows(table.variable, values, None)
            numbers = None
            if state_of is not None:
                numbers = self._numbers(state_of, "copy the state of", table)
                if len(numbers) != len(new):
                    raise ValueError(
                        f'{len(new)} rows are appended to "{self._name}", with the state of '
                        f"{len(numbers)}; there must be one for each"
                    )
            return _appended(table, new, numbers)

        self._change(append)

    def reset(self, rows: Any, values: Any = None) -> None:
        """Has the state of some rows start again, in place.

        Args:
            rows: As in `keep`; no row twice if there are `values`.
            values: [num_rows, ...], what the rows become, in the order of `rows`. By default they
                stay.

        Raises:
            ValueError: As `append`.
        """

        def reset(table: Table) -> _Changed:
            numbers = self._numbers(rows, "reset", table)
            new = None
            if values is not None:
                new = checked_rows(table.variable, values, len(numbers))
                if len(np.unique(numbers)) < len(numbers):
                    raise ValueError(
                        f'rows of "{self._name}" to reset: a row that comes twice cannot get two '
                        "values"
                    )
            else:
                numbers = np.unique(numbers)
            return _reset(table, numbers, new)

        self._change(reset)

    def _numbers(self, rows: Any, verb: str, table: Table) -> np.ndarray[Any, Any]:
        return row_numbers(rows, table.variable.shape[0], f'rows of "{self._name}" to {verb}')

    def _change(self, prepare: Callable[[Table], _Changed]) -> None:
        """Changes all copies, between two steps.

        Args:
            prepare: Called for each copy inside `enter_update` of all that hangs on it: checks the
                arguments, and writes nothing yet.
        """
        if recording.depth():
            raise RuntimeError(
                f'rows of "{self._name}" cannot come or go in a loss that is being recorded: its '
                "gradient would have the shape of the rows before"
            )
        context = replica_context()
        if context.strategy and not context.is_cross_replica and len(self._copies) > 1:
            raise RuntimeError(
                f'rows of "{self._name}" cannot come or go in a replica: each other one would '
                "change all copies again. Change them once, between two calls of strategy.run"
            )
        purpose = f'changing the rows of "{self._name}"'
        # A signal handler's step would write to arrays that are copied already.
        with between_writes(purpose, writes=True, admits_steps=False):
            for each in self._copies:
                make_waiting_slots(each)
            for device in {each.device for each in self._copies}:
                raise_late_errors(device)
            refuse_row_changes(self._copies)
            tables = [table_of(each) for each in self._copies]
            backends = [backend_for(each.device) for each in self._copies]
            replaced: list[tuple[Variable, Any]] = []
            with ExitStack() as updates:
                prepared: list[list[RowCopy]] = []
                for table, backend in zip(tables, backends, strict=True):
                    used: list[Any] = [[each.storage for each in table.variables()]]
                    update = backend.enter_update(*table.identities(), kept=used)
                    updates.enter_context(update)
                    copies, new = prepare(table)
                    used += copies
                    prepared.append(copies)
                    replaced += new
                # Only now is anything written, by `reset` to the arrays that are in use.
                for backend, copies in zip(backends, prepared, strict=True):
                    backend.copy_rows(copies)
            identities = {variable.identity for variable, _ in replaced}
            for optimizer in living_optimizers() if replaced else ():
                optimizer.forget_plans(identities)
            replace_arrays(replaced)


def rows(variable: Any) -> Rows:
    """Returns what changes the rows of a variable.

        gpuopt.rows(table).remove(opacity < 0.005)
        gpuopt.rows(table).append(new_values)

    Args:
        variable: A Variable of one dimension or more, not a slot or an average; or a
            `MirroredVariable`, all of whose copies change, in each process by the same call.

    Raises:
        TypeError: It is something else, as a raw array.
        ValueError: It is a scalar, a slot or an average.
    """
    return Rows(variable)


def _kept(table: Table, numbers: np.ndarray[Any, Any]) -> _Changed:
    new = [_with_height(each, len(numbers)) for each in table.variables()]
    from_rows = backend_for(table.variable.device).from_host(numbers)
    return [RowCopy(array, each.storage, from_rows) for each, array in new], new


def _appended(table: Table, values: Any, state_of: np.ndarray[Any, Any] | None) -> _Changed:
    height = table.variable.shape[0]
    new = [_with_height(each, height + len(values)) for each in table.variables()]
    copies = [RowCopy(array[:height], each.storage) for each, array in new]
    (_, array), *others = new
    copies.append(RowCopy(array[height:], values))
    from_rows = None
    if state_of is not None:
        from_rows = backend_for(table.variable.device).from_host(state_of)
    for dependent, (each, array) in zip(table.dependents, others, strict=True):
        if from_rows is not None:
            copies.append(RowCopy(array[height:], each.storage, from_rows))
        else:
            copies.append(RowCopy(array[height:], _start(dependent, values)))
    return copies, new


def _reset(table: Table, numbers: np.ndarray[Any, Any], values: Any) -> _Changed:
    variable = table.variable
    to_rows = backend_for(variable.device).from_host(numbers)
    copies = []
    current = values
    if values is not None:
        copies.append(RowCopy(variable.storage, values, None, to_rows))
    elif [each for each in table.dependents if each.new_rows == "value"]:
        current = variable.storage[to_rows]
    for dependent in table.dependents:
        start = _start(dependent, current)
        copies.append(RowCopy(dependent.variable.storage, start, None, to_rows))
    return copies, []


def _start(dependent: Dependent, values: Any) -> Any:
    """Returns what rows of a slot or an average start with, for `RowCopy`."""
    dtype = dependent.variable.dtype
    if dependent.new_rows is None:
        raise ValueError(
            f"it is not known what a new row of {dependent.what} starts with: it was made with an "
            "array, or restored. Pass rows whose state is copied, append(..., state_of=rows), or "
            "override _new_slot_rows of the optimizer"
        )
    if dependent.new_rows == "value":
        return values.astype(dtype, copy=False)
    return np.asarray(dependent.new_rows).astype(dtype)[()]


def _with_height(variable: Variable, height: int) -> tuple[Variable, Any]:
    shape = (height, *variable.shape[1:])
    return variable, backend_for(variable.device).empty(shape, variable.dtype)
