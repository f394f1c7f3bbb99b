"""The protocol of values that are brought up to date before a read or write, as lazy rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Protocol

from gpuopt.locks import Lock


class WritesFollowed(Protocol):
    """Something that a user's write to a variable changes, too."""

    def while_written(
        self, written: Any, work: AbstractContextManager[Any], at: Any = ...
    ) -> AbstractContextManager[Any]:
        """Returns a context for the write, after `RowsBehind.bring_up`; it enters `work`.

        Args:
            written: The identity of the variable that is written.
            work: The backend's context for a write.
            at: The index of the written elements.
        """


class RowsBehind(WritesFollowed, Protocol):
    """Brings a table's lazy rows up to date: they have missed steps.

    Another class does the same for a number while a GPU decides about steps that change it; `rows`
    is None then.

    Attributes:
        holds_arrays: Whether it is for the present arrays only, and is dropped when rows come or
            go.
    """

    holds_arrays: bool

    def bring_up(self, rows: Any = None) -> None:
        """Brings rows up to date, and the same rows of the table's slots.

        Args:
            rows: Integers within range, of any shape; they may repeat. None for all rows.
        """


class _OwnNumbers(threading.local):
    """The numbers that a step of this thread computes with, while a GPU decides about others.

    User code in the step does not read them, and waits for the GPU.

    Attributes:
        of: Arrays, by the identities of the variables that count steps.
        ledger: The `RowsBehind` that may have a GPU decide about the step; else None.
    """

    of: Mapping[Any, Any] = MappingProxyType({})
    ledger: RowsBehind | None = None


own_numbers = _OwnNumbers()

# Held inside the gate while the host changes numbers that count steps, or has a GPU change them:
# steps of several threads and optimizers may change the same ones.
counting = Lock("the numbers that count steps")
