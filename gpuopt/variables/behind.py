"""What must be brought up to date before it is read or written, as rows behind their steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

from gpuopt.locks import Lock


class RowsBehind(Protocol):
    """Knows which rows of a table have missed steps, and what these would have done.

    Or which steps a GPU has left out, of those that change a number: of this, `rows` is None.
    Or that a variable has a master copy, to which is written what is written to it.

    Attributes:
        holds_arrays: Whether it is for these arrays alone, and goes when rows come or go.
    """

    holds_arrays: bool

    def bring_up(self, rows: Any = None) -> None:
        """Brings rows up to date, and the same rows of the table's slots.

        Args:
            rows: Integers within range, of any shape; they may repeat. None for all rows.
        """

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        """Returns a context that is `work`, inside which a user writes what was brought up.

        Args:
            written: The identity of what is written.
            work: Of the backend.
            at: The index of what is written.
        """


class _OwnNumbers(threading.local):
    """The numbers that a step of this thread computes with, where it does not know the real ones.

    User code that the step calls does not see them: it waits for the real ones.

    Attributes:
        of: Arrays, by the identities of variables that are behind.
        ledger: The `RowsBehind` that may have a GPU decide about the step; else None.
    """

    of: Mapping[Any, Any] = MappingProxyType({})
    ledger: RowsBehind | None = None


own_numbers = _OwnNumbers()

# Held inside the gate while a step changes the numbers that count steps, or has a GPU change them:
# steps of several threads and optimizers may change the same ones.
counting = Lock("the numbers that count steps")
