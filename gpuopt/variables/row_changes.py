"""Changes of variables' rows: checks before, and a counter by which a step notices them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import starmap
from typing import Any, Protocol

from gpuopt.variables.identity import Identity
from gpuopt.variables.registry import Registry
from gpuopt.variables.variable import Variable


class RowHolder(Protocol):
    """Something that keeps arrays of a variable's shape which do not change with its rows."""

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        """Raises ValueError if the rows of one of these variables cannot come or go.

        Args:
            variables: Those whose rows change together.
        """


class PlanHolder(Protocol):
    """Something beside optimizers that keeps plans for updates of variables."""

    def forget_plans(self, changed: Set[Identity]) -> None:
        """Drops the plans for variables that get other arrays."""


class _Changes:
    """What has changed so far.

    Attributes:
        number: Of the last change; grows with each.
    """

    def __init__(self) -> None:
        self.number = 0


changes = _Changes()
_holders: Registry[RowHolder] = Registry("the list of those who hold rows")
_planners: Registry[PlanHolder] = Registry("the list of those who hold plans")


def register(holder: RowHolder) -> None:
    """Has `refuse_row_changes` ask this holder, for as long as it lives."""
    _holders.add(holder)


def register_plans(holder: PlanHolder) -> None:
    """Has `forget_plans` tell this holder, for as long as it lives."""
    _planners.add(holder)


def forget_plans(changed: Set[Identity]) -> None:
    """Drops all plans for some variables but those of optimizers."""
    for holder in _planners.listed():
        holder.forget_plans(changed)


def refuse_row_changes(variables: Sequence[Variable]) -> None:
    """Raises ValueError if somebody needs the rows of one of these variables as they are."""
    for holder in _holders.listed():
        holder.refuse_row_changes(variables)


def replace_arrays(changed: Iterable[tuple[Variable, Any]]) -> None:
    """Gives variables other arrays, all at once; called where nobody reads or writes them.

    Args:
        changed: Variables, each with storage of its own for it.
    """
    changed = list(changed)
    number = changes.number + 1
    # Until all are replaced: the end of memory may call Python code.
    old = [variable.unread_storage for variable, _ in changed]
    assignments: list[tuple[Any, str, Any]] = [(changes, "number", number)]
    for variable, array in changed:
        behind = variable.identity.behind
        if behind is not None and behind.holds_arrays:
            behind = None
        assignments += [
            (variable, "_array", array),
            (variable, "owns_memory", True),
            (variable.identity, "row_change", number),
            (variable.identity, "behind", behind),
        ]
    # Built-in functions call each other: neither a signal handler nor another thread runs between.
    deque(starmap(setattr, assignments), maxlen=0)
    del old


def refuse_changed(variables: Iterable[Variable], since: int) -> None:
    """Raises RuntimeError if rows of a variable have changed.

    Args:
        variables: Of a step.
        since: The `changes.number` when the step began.
    """
    for variable in variables:
        if variable.identity.row_change > since:
            raise RuntimeError(
                f'the rows of "{variable.name}" came or went while a step with a gradient for it '
                "was prepared, by another thread or a function that the step has called: the "
                "gradient is one of the rows before, and nothing was written. Compute it again"
            )
