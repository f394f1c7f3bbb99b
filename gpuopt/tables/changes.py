"""The arrays that a table gets when its rows come and go."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuopt.backends import backend_for
from gpuopt.backends.backend import RowCopy
from gpuopt.tables.dependents import Dependent, Table
from gpuopt.variables.variable import Variable

# What happens to a table: copies, and the variables that get other arrays by them.
Changed = tuple[list[RowCopy], list[tuple[Variable, Any]]]


def kept(table: Table, numbers: np.ndarray[Any, Any]) -> Changed:
    """Prepares arrays that have some rows of a table alone, in the order of their numbers."""
    new = [_with_height(each, len(numbers)) for each in table.variables()]
    from_rows = backend_for(table.variable.device).from_host(numbers)
    return [RowCopy(array, each.storage, from_rows) for each, array in new], new


def appended(table: Table, values: Any, state_of: np.ndarray[Any, Any] | None) -> Changed:
    """Prepares arrays with more rows at the end.

    Args:
        table: What gets them.
        values: The variable's new rows, of its dtype and on its device.
        state_of: The numbers of the rows whose slots and averages they get; None to start anew.

    Raises:
        ValueError: it is not known what a slot starts with.
    """
    height = table.variable.shape[0]
    new = [_with_height(each, height + len(values)) for each in table.variables()]
    copies = [RowCopy(array[:height], each.storage) for each, array in new]
    (_, array), *others = new
    copies.append(RowCopy(array[height:], values))
    from_rows = None
    if state_of is not None:
        from_rows = backend_for(table.variable.device).from_host(state_of)
    for dependent, (each, array) in zip(table.dependents, others, strict=True):
        if from_rows is not None and dependent.new_rows != "master":
            copies.append(RowCopy(array[height:], each.storage, from_rows))
        else:
            copies.append(RowCopy(array[height:], _start(dependent, values)))
    return copies, new


def with_state_reset(table: Table, numbers: np.ndarray[Any, Any], values: Any) -> Changed:
    """Prepares the reset of rows in place.

    Args:
        table: Whose rows.
        numbers: Theirs.
        values: What the rows of the variable become; None if they stay.

    Raises:
        ValueError: it is not known what a slot starts with.
    """
    variable = table.variable
    to_rows = backend_for(variable.device).from_host(numbers)
    copies = []
    current = values
    if values is not None:
        copies.append(RowCopy(variable.storage, values, None, to_rows))
    elif [each for each in table.dependents if each.new_rows in ("value", "master")]:
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
    if dependent.new_rows in ("value", "master"):
        return values.astype(dtype, copy=False)
    return np.asarray(dependent.new_rows).astype(dtype)[()]


def _with_height(variable: Variable, height: int) -> tuple[Variable, Any]:
    shape = (height, *variable.shape[1:])
    return variable, backend_for(variable.device).empty(shape, variable.dtype)
