"""What was found out about a list of variables, kept from step to step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from gpuopt.variable import Variable

Kept = TypeVar("Kept")

# Who updates other variables in each step gains nothing from what is old.
_MOST_LISTS = 256


class _Entry(NamedTuple, Generic[Kept]):
    kept: Kept
    # Only watched: their callbacks drop the entry.
    variables: list[weakref.ref[Variable]]


class ByVariables(Generic[Kept]):
    """Values by lists of variables, each for as long as all of its variables live.

    A raw array's variable lasts no longer than a call, so nothing is kept for a list with one: what
    is kept may hold arrays, and the memory would be kept from going.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, ...], _Entry[Kept]] = {}

    def get(self, variables: Sequence[Any]) -> Kept | None:
        """Returns what is kept for these very variables, in this order."""
        entry = self._entries.get(tuple(map(id, variables)))
        return None if entry is None else entry.kept

    def keep(self, variables: Sequence[Variable], value: Kept) -> None:
        """Keeps a value, unless there is a raw array among the variables."""
        if any(variable.is_raw_array for variable in variables):
            return
        if len(self._entries) >= _MOST_LISTS:
            self._entries.clear()
        key = tuple(map(id, variables))
        forget = partial(_forget, weakref.ref(self), key)
        watched = [weakref.ref(variable, forget) for variable in variables]
        self._entries[key] = _Entry(value, watched)


def _forget(
    lists: weakref.ref[ByVariables[Any]], key: tuple[int, ...], dead: weakref.ref[Variable]
) -> None:
    living = lists()
    if living is not None:
        living._entries.pop(key, None)
