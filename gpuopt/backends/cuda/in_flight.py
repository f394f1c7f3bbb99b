"""Keeps alive what queued work uses, where another stream might be given its memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from gpuopt.backends.cuda.launcher import Event, Launcher, wait_for_event


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
