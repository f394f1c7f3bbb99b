"""Which update comes after which, across the streams of one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from gpuopt.backends.backend import Updated
from gpuopt.backends.cuda.launcher import Event, Launcher


class LastUpdate:
    """When variables that were updated together were updated.

    Attributes:
        stream: On which.
        event: The update's end.
        is_superseded: Whether some of the variables have been updated without the others since.
    """

    __slots__ = ("event", "is_superseded", "stream")

    def __init__(self, stream: Hashable) -> None:
        self.stream = stream
        self.event: Event | None = None
        self.is_superseded = False


class UpdateOrder:
    """Has a stream wait for updates of the same variables by other streams.

    Variables of one plan share one note of their last update, so that a step of thousands of them
    looks at one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        # Gradients that other streams' memory may hold, with the event after which nobody reads.
        self._held: deque[tuple[Event, Sequence[Any]]] = deque()
        self._made: dict[Hashable, LastUpdate] = {}

    def made(self, new: Updated) -> None:
        """Has other streams wait for what was first written to something new."""
        stream = self._launcher.stream()
        last = self._made.setdefault(stream, LastUpdate(stream))
        last.event = self._launcher.record(last.event)
        new.last_update = last

    def follow(self, updated: Sequence[Updated]) -> None:
        """Has the current stream wait for the last updates."""
        stream = self._launcher.stream()
        for last in {id(u.last_update): u.last_update for u in updated}.values():
            self._wait(last, stream)

    def begin(self, updated: Sequence[Updated], last: LastUpdate | None = None) -> LastUpdate:
        """Does what `follow` does, for an update that begins now.

        Args:
            updated: What is about to be written.
            last: What `begin` returned for the same list the last time.

        Returns:
            What `end` takes.
        """
        while self._held and self._held[0][0].done:
            self._held.popleft()
        stream = self._launcher.stream()
        if last is not None and not last.is_superseded:
            self._wait(last, stream)
            return last
        self.follow(updated)
        fresh = LastUpdate(stream)
        for holder in updated:
            if holder.last_update is not None:
                holder.last_update.is_superseded = True
            holder.last_update = fresh
        return fresh

    def end(self, last: LastUpdate, gradients: Sequence[Any] = ()) -> None:
        """Notes that the update is enqueued.

        A pool gives freed memory to the stream that it was made on, which need not be the one that
        still reads it. Who works on the default stream alone has only that one.
        """
        last.stream = self._launcher.stream()
        last.event = self._launcher.record(last.event)
        if gradients and not self._launcher.is_default_stream():
            self._held.append((self._launcher.record(), gradients))

    def _wait(self, last: LastUpdate | None, stream: Hashable) -> None:
        if last is not None and last.event is not None and last.stream != stream:
            self._launcher.wait(last.event)
