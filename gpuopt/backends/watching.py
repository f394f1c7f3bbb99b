"""Launches that are watched: what a thread's steps start on each device, and how long it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol


class Watcher(Protocol):
    """Is told of each launch of a thread."""

    def note_launch(self, device: str, name: str, read_ms: Callable[[], float]) -> None:
        """Takes note of a launch.

        Args:
            device: Where it runs, as "gpu:0".
            name: What runs, and by which rule.
            read_ms: Waits for its end, and returns how many milliseconds it took.
        """


class _ThisThread(threading.local):
    """What watches this thread's launches; None as long as nothing does."""

    watcher: Watcher | None = None


this_thread = _ThisThread()
