"""Watched threads: what their steps start on each device, how long it takes, and each wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Is told of each launch of a thread, and when the thread waits for a GPU."""

    def note_launch(self, device: str, name: str, read_ms: Callable[[], float]) -> None:
        """Takes note of a launch.

        Args:
            device: Where it runs, as "gpu:0".
            name: What runs, and by which rule.
            read_ms: Waits for its end, and returns how many milliseconds it took.
        """

    def note_wait(self) -> None:
        """Takes note that the thread begins to wait for a GPU."""


class _ThisThread(threading.local):
    """What watches this thread; None as long as nothing does."""

    watcher: Watcher | None = None


this_thread = _ThisThread()


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """Has this thread watched inside, by `watcher` alone."""
    outer = this_thread.watcher
    try:
        this_thread.watcher = watcher
        yield
    finally:
        this_thread.watcher = outer
