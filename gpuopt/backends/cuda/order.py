"""Puts updates of the same variables in order, across the streams of one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

from gpuopt.backends.backend import Updated
from gpuopt.backends.cuda.launcher import Event, Launcher


class LastUpdate:
    """The last update of variables that were updated together.

    Attributes:
        stream: The stream that it was enqueued on.
        event: Recorded at its end; None before that.
        is_superseded: Whether some of the variables have been updated without the others since.
    """

    __slots__ = ("event", "is_superseded", "stream")

    def __init__(self, stream: Hashable) -> None:
        self.stream = stream
        self.event: Event | None = None
        self.is_superseded = False


class UpdateOrder:
    """Makes a stream wait for updates of the same variables on other streams.

    Variables of one plan share a `LastUpdate`, so that a step of thousands of variables looks at
    one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        # Gradients that are kept alive until this event: their pool may belong to another stream,
        # and would reuse the memory early.
        self._held: deque[tuple[Event, Sequence[Any]]] = deque()
        # The last creation on each stream.
        self._creations: dict[Hashable, LastUpdate] = {}

    def record_creation(self, new: Updated) -> None:
        """Makes other streams wait for the first write to something new, on the current stream."""
        stream = self._launcher.stream()
        last = self._creations.setdefault(stream, LastUpdate(stream))
        last.event = self._launcher.record(last.event)
        new.last_update = last

    def follow(self, updated: Sequence[Updated]) -> None:
        """Makes the current stream wait for the last updates of these identities."""
        stream = self._launcher.stream()
        for last in {id(u.last_update): u.last_update for u in updated}.values():
            self._wait(last, stream)

    def begin(self, updated: Sequence[Updated], last: LastUpdate | None = None) -> LastUpdate:
        """Begins an update: makes the current stream wait for the last ones.

        Args:
            updated: The identities whose arrays are about to be written.
            last: What `begin` returned for the same identities the last time, if it was called.

        Returns:
            The update, for `end`.
        """
        while self._held and self._held[0][0].done:
            self._held.popleft()
        stream = self._launcher.stream()
        if last is not None and not last.is_superseded:
            self._wait(last, stream)
            return last
        self.follow(updated)
        fresh = LastUpdate(stream)
        for identity in updated:
            if identity.last_update is not None:
                identity.last_update.is_superseded = True
            identity.last_update = fresh
        return fresh

    def end(self, last: LastUpdate, gradients: Sequence[Any] = ()) -> None:
        """Records the end of an update on the current stream, where it has been enqueued.

        Args:
            last: From `begin`.
            gradients: Arrays that the update reads. On any stream but the default one they are
                kept alive until it is done: a memory pool gives a freed array's memory to the
                stream that the array was made on, while this one may still read it. A program that
                uses the default stream alone has no other stream to give it to.
        """
        last.stream = self._launcher.stream()
        last.event = self._launcher.record(last.event)
        if gradients and not self._launcher.is_default_stream():
            self._held.append((self._launcher.record(), gradients))

    def _wait(self, last: LastUpdate | None, stream: Hashable) -> None:
        if last is not None and last.event is not None and last.stream != stream:
            self._launcher.wait(last.event)
