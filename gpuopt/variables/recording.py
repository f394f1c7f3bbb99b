"""The recorders of a thread: a loss's reads and writes of variables go to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Recorder(Protocol):
    """Stands between a variable and the loss that reads it."""

    def read(self, variable: Any) -> Any:
        """Returns the object that the loss computes with in place of the variable's array."""

    def lookup(self, table: Any, ids: Any) -> Any:
        """Returns rows of a table, whose gradient is IndexedSlices if it is a variable."""

    def watches(self, variable: Any) -> bool:
        """Says whether gradients will flow back to this variable."""

    def before_write(self, variable: Any) -> None:
        """Raises RuntimeError if a gradient still needs the value that is about to be lost."""


class _ThisThread(threading.local):
    recorders: tuple[Recorder, ...] = ()


# Public, because each step reads it: a function call would cost time.
this_thread = _ThisThread()


def recorder() -> Recorder | None:
    """Returns the innermost recorder of this thread."""
    recorders = this_thread.recorders
    return recorders[-1] if recorders else None


def before_write(variables: Iterable[Any]) -> None:
    """Asks the recorders of this thread whether `variables` may be written now.

    Raises:
        RuntimeError: a loss that is being recorded has computed with a variable's present value.
    """
    recorders = this_thread.recorders
    if recorders:
        for variable in variables:
            for by in recorders:
                by.before_write(variable)


def depth() -> int:
    """Returns how many losses are being recorded on this thread, one inside the other."""
    return len(this_thread.recorders)


def record(by: Recorder, call: Callable[[], Result]) -> Result:
    """Tells `by` of the variables that `call` reads and writes; returns its result."""
    # No context manager: Ctrl-C before the first line of its `__exit__` would leave `by` there.
    outer = this_thread.recorders
    try:
        this_thread.recorders = (*outer, by)
        return call()
    finally:
        this_thread.recorders = outer
