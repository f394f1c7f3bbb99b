"""A thread that ends the program's wait for collectives that do not end."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from gpuopt.locks import Condition, renew_after_fork


class Watched(Protocol):
    """Something with work under way."""

    def look(self) -> bool:
        """Looks whether the work is late; returns whether there is any left."""


class _Watchdog:
    """A thread that looks at whatever has work under way, and sleeps while nothing has."""

    PAUSE_S = 0.02

    def __init__(self) -> None:
        self._changed = Condition("the watchdog of collectives")
        self._watched: set[Watched] = set()
        self._thread: threading.Thread | None = None
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The thread is the parent's."""
        self._watched.clear()
        self._thread = None

    def watch(self, watched: Watched) -> None:
        """Has `watched.look` called again and again, until it returns False."""
        if watched in self._watched:
            return
        with self._changed:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpuopt", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._watched))
            for watched in list(self._watched):
                # Before the look: what begins after it is watched anew.
                with self._changed:
                    self._watched.discard(watched)
                if watched.look():
                    with self._changed:
                        self._watched.add(watched)
            time.sleep(self.PAUSE_S)


watchdog = _Watchdog()
