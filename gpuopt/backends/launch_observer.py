"""Observers of a thread's launches on all devices, and of its waits for a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class LaunchObserver(Protocol):
    """Notes each launch of a thread, and each wait of it for a GPU."""

    def note_launch(self, device: str, name: str, read_ms: Callable[[], float]) -> None:
        """Notes a launch.

        Args:
            device: Where it runs, as "gpu:0".
            name: The kernel's name and the rule's.
            read_ms: Waits for its end, and returns how many milliseconds it took.
        """

    def note_wait(self) -> None:
        """Notes that the thread begins to wait for a GPU."""


class _ThisThread(threading.local):
    """The observer of this thread; None if there is none."""

    observer: LaunchObserver | None = None


this_thread = _ThisThread()


@contextmanager
def observed_by(observer: LaunchObserver | None) -> Iterator[None]:
    """Has one observer, or none, observe this thread inside."""
    outer = this_thread.observer
    try:
        this_thread.observer = observer
        yield
    finally:
        this_thread.observer = outer
