"""Puts work on the same variables in order, across streams, and keeps its arrays meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from gpuopt.backends.backend import Updated
from gpuopt.backends.cuda.launcher import Event, Launcher, wait_for_event

MOST_STREAMS = 8
"""Of so many streams, buffers of their own are kept: a program may use a new stream each time."""


class LastUpdate:
    """The last update of variables that were updated together, and what has read them since.

    Attributes:
        stream: The stream that it was enqueued on.
        event: Recorded at its end; None before that.
        reads: Events at the end of readings that the next update must wait for, by stream.
        is_superseded: Whether some of the variables have been updated without the others since.
        step: The result of `InFlight.begin_update`.
    """

    __slots__ = ("event", "is_superseded", "reads", "step", "stream")

    def __init__(self, stream: Hashable) -> None:
        self.stream = stream
        self.event: Event | None = None
        self.reads: dict[Hashable, Event] = {}
        self.is_superseded = False
        self.step = 0


class _Held(NamedTuple):
    """Arrays, or their holders, that are kept alive until the event is done."""

    event: Event
    step: int
    objects: Any


class InFlight:
    """The arrays that work in flight on one device reads and writes.

    A memory pool gives a freed array's memory to the stream that the array was made on, at once,
    while another stream may still use it. So once a stream other than the default one is seen,
    everything that an update uses is kept until it is done: its gradients may be another stream's.
    A program that makes no stream has no other to give memory to.

    Attributes:
        held: What is kept, the oldest first.
        holds: Whether updates' arrays are kept: whether calls have come on more than one stream, or
            on one that is not the default one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.holds = False
        self._stream: Hashable = None
        self.held: deque[_Held] = deque()
        # Grows when a variable is updated that was updated in this step already.
        self._step = 1

    def current_stream(self) -> Hashable:
        """Returns the current stream, and notes that it is in use."""
        stream = self._launcher.stream()
        if stream != self._stream:
            is_first = self._stream is None
            self.holds = not is_first or not self._launcher.is_default_stream()
            self._stream = stream
        return stream

    def hold(self, event: Event, objects: Any) -> None:
        """Keeps objects alive until an event is done; lets go those whose event is done."""
        self._let_go()
        self.held.append(_Held(event, self._step, objects))

    def begin_update(self, before: Iterable[LastUpdate]) -> int:
        """Lets go objects whose work is done; at a new step, waits for the one before the last.

        Updates need not call it while nothing is held, nor is to be.

        So the objects of two steps are held, and no more.

        Args:
            before: The last updates of the variables that are about to be updated.

        Returns:
            The number of the step.
        """
        held = self.held
        self._let_go()
        if any(last.step == self._step for last in before):
            self._step += 1
            while held and held[0].step < self._step - 1:
                wait_for_event(held[0].event, "a GPU, which is two steps behind")
                self._let_go()
        return self._step

    def _let_go(self) -> None:
        """Lets go the objects of work that is done.

        A write by a signal handler may come in between, and let go some of it first.
        """
        while self.held:
            oldest = self.held[0]
            if not oldest.event.done:
                return
            if self.held and self.held[0] is oldest:
                self.held.popleft()


class UpdateOrder:
    """Makes a stream wait for updates and readings of the same variables on other streams.

    Variables of one plan share a `LastUpdate`, so that a step of thousands of variables looks at
    one.
    """

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.in_flight = InFlight(launcher)
        # The last creation, on the stream that is current in most calls.
        self._creation: LastUpdate | None = None

    def record_creation(self, new: Updated) -> None:
        """Makes other streams wait for the first write to something new, on the current stream."""
        stream = self.in_flight.current_stream()
        last = self._creation
        if last is None or last.stream != stream or last.reads:
            last = self._creation = LastUpdate(stream)
        last.event = self._launcher.record(last.event)
        new.last_update = last

    def follow(self, updated: Iterable[Updated]) -> None:
        """Makes the current stream wait for the last updates of these identities."""
        stream = self.in_flight.current_stream()
        for last in _distinct(updated):
            if last.stream != stream:
                self._wait(last, stream)

    def end_reading(self, read: Iterable[Updated], kept: Sequence[Any] = ()) -> None:
        """Makes the next updates of identities wait for the current stream's work so far.

        `follow` was called for them; see `end` for `kept`.
        """
        stream = self.in_flight.current_stream()
        event = self._launcher.record()
        _note_reading(read, stream, event)
        self.hold(kept, event)

    def begin(
        self,
        updated: Sequence[Updated],
        last: LastUpdate | None = None,
        read: Sequence[Updated] = (),
        *,
        is_step: bool = True,
    ) -> LastUpdate:
        """Begins an update: makes the current stream wait for the last ones, and for readings.

        Args:
            updated: The identities whose arrays are about to be written.
            last: The result of the last `begin` for the same identities; None if there was none.
            read: The identities that the update reads; see `end`.
            is_step: Whether a second update of the same identities belongs to another step.

        Returns:
            The update, for `end`.
        """
        stream = self.in_flight.current_stream()
        is_same = last is not None and not last.is_superseded
        before = [last] if last is not None and is_same else _distinct(updated)
        in_flight, step = self.in_flight, 0
        if is_step and (in_flight.holds or in_flight.held):
            step = in_flight.begin_update(before)
        for each in before:
            if each.stream != stream:
                self._wait(each, stream)
            for reader, event in each.reads.items():
                if reader != stream:
                    self._launcher.wait(event)
        for identity in read:
            written = identity.last_update
            if written is not None and written.stream != stream:
                self._wait(written, stream)
        if last is None or not is_same:
            last = LastUpdate(stream)
            if before:
                # Until `end`, and after an interrupt: work that came before can be waited for.
                last.event = self._launcher.record()
            for identity in updated:
                if identity.last_update is not None:
                    identity.last_update.is_superseded = True
                identity.last_update = last
        if step:
            last.step = step
        last.reads.clear()
        last.stream = stream  # which waits for the event, that may be another's
        return last

    def put_last(self, last: LastUpdate, updated: Sequence[Updated]) -> None:
        """Makes an update the last one again, if another thread's has begun since.

        Args:
            last: From `begin`, after which another thread could call it. `end` is to follow.
            updated: The same as for `begin`.
        """
        stream = last.stream = self.in_flight.current_stream()
        others = [each for each in _distinct(updated) if each is not last]
        for each in others:
            self._wait(each, stream)
            last.reads.update(each.reads)
            each.is_superseded = True
        if others:
            for identity in updated:
                identity.last_update = last

    def end(self, last: LastUpdate, kept: Sequence[Any] = (), read: Sequence[Updated] = ()) -> None:
        """Records the end of an update on the stream that was current in `begin` or `put_last`.

        Args:
            last: From `begin`.
            kept: Arrays that the update uses, which are kept alive until it is done, if need be.
            read: The identities that `begin` was given: later updates wait for it.
        """
        # Not the last event again: objects may be held until it is done.
        again = None if self.in_flight.holds else last.event
        last.event = self._launcher.record(again)
        if read:
            _note_reading(read, last.stream, last.event)
        if self.in_flight.holds:
            self.hold(kept, last.event)

    def hold(self, kept: Sequence[Any], event: Event | None = None) -> None:
        """Keeps objects alive until an event, or else the current stream's work so far, is done."""
        if kept and self.in_flight.holds:
            self.in_flight.hold(event or self._launcher.record(), kept)

    def has_several_streams(self) -> bool:
        """Whether calls have come on more than one stream, the current one included."""
        self.in_flight.current_stream()
        return self.in_flight.holds

    def has_one_stream(self) -> bool:
        """Whether memory that is freed can only go to the current stream, as far as is known."""
        return not self.in_flight.holds and self._launcher.is_default_stream()

    def _wait(self, last: LastUpdate, stream: Hashable) -> None:
        if last.event is None or last.stream == stream:
            return
        # A capture cannot wait for earlier work, and need not if that is done.
        if not (self._launcher.is_capturing() and last.event.done):
            self._launcher.wait(last.event)


def _distinct(updated: Iterable[Updated]) -> list[LastUpdate]:
    lasts = {id(each.last_update): each.last_update for each in updated}
    return [last for last in lasts.values() if last is not None]


def _note_reading(read: Iterable[Updated], stream: Hashable, event: Event) -> None:
    for identity in read:
        if identity.last_update is None:
            identity.last_update = LastUpdate(stream)
        identity.last_update.reads[stream] = event
