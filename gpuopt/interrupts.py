"""Delays Ctrl-C while several arrays are written."""

from __future__ import annotations

# Its functions do not look for an enum's member for each handler, which takes 4 times as long.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from operator import call
from types import FrameType, TracebackType
from typing import Any

# Elements of variables. To write so many takes longer than to put Ctrl-C off.
SMALL_WRITE = 100_000


class interrupts_put_off:
    """Within this context, SIGINT waits: its handler is called at the end, and may raise then.

    In the main thread alone, which is the one that handlers run in. A second SIGINT is not put off:
    the handler is called where the program is. A context inside another leaves the end to the outer
    one, and so does a handler that is not Python's (`SIG_DFL`, `SIG_IGN`, or C's).

    Exchanging the handler twice takes some 4 us, so small writes do without: see `SMALL_WRITE`.
    """

    __slots__ = ("_handler", "_is_due", "_thread", "_waits_for_begin")

    def __init__(self, *, waits_for_begin: bool = False) -> None:
        """Does nothing yet.

        Args:
            waits_for_begin: SIGINT waits from `begin` on, not from the context's begin. So what is
                waited for can be interrupted, and the handler is called where nothing is locked.
        """
        self._handler: Any = None
        self._is_due = False
        self._thread = threading.get_ident()
        self._waits_for_begin = waits_for_begin

    def __enter__(self) -> None:
        if not self._waits_for_begin:
            self.begin()

    def begin(self) -> None:
        """Has SIGINT wait until the end of the context; does nothing if it waits already."""
        if self._handler is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            return
        handler = _signal.getsignal(signal.SIGINT)
        if callable(handler) and not isinstance(getattr(handler, "__self__", None), type(self)):
            self._handler = handler
            try:
                _signal.signal(signal.SIGINT, self._note)
            except BaseException:  # of the handler of another signal
                self._restore()
                raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        handler = self._handler
        if handler is None:
            return
        try:
            self._restore()
        except BaseException:  # of the handler of another signal
            self._restore()
            raise
        if self._is_due:
            self._is_due = False
            handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_due:
            self._is_due = True
            return
        self._is_due = False
        handler = self._handler
        self._restore()
        handler(number, frame)

    def _restore(self) -> None:
        # Unless the program has set another handler meanwhile.
        if _signal.getsignal(signal.SIGINT) == self._note:
            _signal.signal(signal.SIGINT, self._handler)


def _end_that_of_another_thread() -> None:
    """In a child that is forked by another thread than the main one, no context ends."""
    context = getattr(_signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(context, interrupts_put_off) and context._thread != threading.get_ident():
        context._restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_that_of_another_thread)


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Calls built-in functions, none of which runs Python code.

    So no signal handler comes between two of them: Ctrl-C comes before the first, or after the
    last.
    """
    deque(map(call, calls), maxlen=0)
