"""Calls and contexts in another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class InThread:
    """A call in another thread; what it raises is raised by `join`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="other", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def join(self) -> None:
        assert self.ends_within(60)
        if self._error is not None:
            raise self._error


@contextmanager
def held(context: Callable[[], Any]) -> Iterator[None]:
    """Enters a context in another thread for as long as the block runs."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with context():
            entered.set()
            assert leave.wait(30)

    thread = InThread(hold)
    assert entered.wait(30)
    try:
        yield
    finally:
        leave.set()
        thread.join()


def in_threads(*calls: Callable[[], Any]) -> None:
    """Makes calls in threads of their own, and waits for all; raises the first one's error."""
    for thread in [InThread(call) for call in calls]:
        thread.join()


@contextmanager
def repeated(
    call: Callable[[], Any], threads: int = 1, *, alternate: bool = False
) -> Iterator[None]:
    """Makes a call again and again in other threads while the block runs.

    Args:
        call: Raises in the end of the block if it fails.
        threads: How many make it.
        alternate: Whether threads take turns as often as Python can.
    """
    end, interval = threading.Event(), sys.getswitchinterval()

    def repeat() -> None:
        while not end.is_set():
            call()

    if alternate:
        sys.setswitchinterval(1e-6)
    started = [InThread(repeat) for _ in range(threads)]
    try:
        yield
    finally:
        end.set()
        for thread in started:
            thread.ends_within(60)
        sys.setswitchinterval(interval)
    for thread in started:
        thread.join()
