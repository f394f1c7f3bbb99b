"""Who is told that a variable is read: the engine that differentiates a loss on this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Recorder(Protocol):
    """Stands between a variable and the loss that reads it."""

    def read(self, variable: Any) -> Any:
        """Returns what the loss computes with in place of the variable's array."""

    def lookup(self, table: Any, ids: Any) -> Any:
        """Returns rows of a table, whose gradient is IndexedSlices if it is a variable."""

    def watches(self, variable: Any) -> bool:
        """Says whether gradients will flow back to this variable."""


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


_this_thread = _ThisThread()


def recorder() -> Recorder | None:
    """Returns the innermost recorder of this thread."""
    recorders = _this_thread.recorders
    return recorders[-1] if recorders else None


def depth() -> int:
    """Returns how many losses are being recorded on this thread, one inside the other."""
    return len(_this_thread.recorders)


@contextmanager
def recording(by: Recorder) -> Iterator[None]:
    """Has `by` told of the variables that are read on this thread."""
    _this_thread.recorders.append(by)
    try:
        yield
    finally:
        _this_thread.recorders.pop()
