"""The gate: saves and restores wait for steps and other writes, and these for them.

Every thread has a passage through the gate, which it locks while it writes. Whoever saves or
restores closes the gate and waits until no passage is locked; who wants to write meanwhile waits
until the gate is open again.

Nothing is counted: locks alone say who is inside. A `with` statement releases each by the lock's
own `__exit__`, and the interpreter runs no signal handler between the call of a built-in and its
effect. So Ctrl-C at any moment leaves nothing shut. For the same reason, who waits looks again and
again: a notice could get lost with the one who was to give it.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, cast

from gpuopt.locks import Lock, Waiting

# Between two saves, those who were held back by the first have so long to begin their write.
_TURN_S = 0.02

_inside = nullcontext()


def writing() -> AbstractContextManager[None]:
    """Writes state beside other threads: an optimizer's step, or a variable's new value by hand.

    What is written inside is seen in full by a save, or not at all. A step inside a step, as of an
    optimizer that wraps another, belongs to the outer one. Locks that a save or a restore takes,
    too, are taken inside of the step, never around it.

    Raises:
        RuntimeError: called by a signal handler in the middle of a save, or of its wait.
        DeadlineExceededError: a save or a restore by another thread does not end.
    """
    passage = _passages.get(get_ident()) or _new_passage()
    if not passage.lock.locked():
        return passage
    if last_closing.is_done:  # where this thread has not seen yet that the gate is closed
        raise RuntimeError(
            f"a signal handler cannot write while it interrupts who waits for "
            f"{last_closing.describe()}: let it set a flag, and write after that"
        )
    return _inside


def undoing() -> AbstractContextManager[None]:
    """Does what `writing` does, also inside a `between_writes` that admits no steps.

    So a save undoes refused calls, and a change of rows makes restored slots.

    Raises:
        DeadlineExceededError: a save or a restore by another thread does not end.
    """
    passage = _passages.get(get_ident()) or _new_passage()
    if last_closing.is_this_threads() and not passage.lock.locked():
        return cast(AbstractContextManager[None], passage.lock)
    return writing()


def between_writes(
    purpose: str, *, writes: bool = False, admits_steps: bool = True
) -> AbstractContextManager[None]:
    """Waits until no other thread is in the middle of a step, and holds the next steps back.

    Args:
        purpose: What is done inside, for the errors of those who wait, as "saving model-1".
        writes: Whether this thread writes state inside, as a restore does. If not, a signal handler
            that tries to write meanwhile gets an error: what is read would be half the old state.
        admits_steps: Whether it does not, where this thread writes state. If not, what this thread
            itself writes by way of `writing` goes into `undoing`.

    Raises:
        RuntimeError: this thread itself is in the middle of a step.
        DeadlineExceededError: another thread does not end its step, its save or its restore.
    """
    closing = last_closing
    if closing.is_this_threads():
        closing.refuse_within(writes)
        closing.wait_for_writers()  # a signal handler may have come before that was done
        return _inside
    refuse_while_writing()
    return _Closing(purpose, writes, writes and admits_steps)


def refuse_while_writing() -> None:
    """Raises RuntimeError if this thread is in the middle of a step, a save or a restore."""
    refuse_between_writes()
    passage = _passages.get(get_ident())
    if passage is not None and passage.lock.locked():
        raise RuntimeError(
            "state cannot be saved or restored, nor get other rows, in the middle of a step, as "
            "from a hook of the optimizer or a signal handler: half of it is the old step's; do it "
            "after apply_gradients"
        )


def refuse_between_writes() -> None:
    """Raises RuntimeError if this thread is in the middle of a save or a restore."""
    closing = last_closing
    if closing.is_this_threads():
        closing.refuse()


def is_writing(thread: int) -> bool:
    """Whether a thread, by its identifier, is inside `writing`."""
    passage = _passages.get(thread)
    return passage is not None and passage.lock.locked()


def is_between_writes() -> bool:
    """Whether this thread is inside `between_writes`."""
    return last_closing.is_this_threads()


def note_progress() -> None:
    """Lets those whom this thread holds back wait on: what it does takes long, but goes on."""
    closing = last_closing
    if closing.is_this_threads():
        closing.last_progress = time.monotonic()


class _Release(property):
    """`__exit__` of what has a lock: the lock's own, which a `with` statement calls directly."""

    def __init__(self) -> None:
        super().__init__(attrgetter("lock.__exit__"))

    def __call__(self, instance: _Passage | _Closing, *error: Any) -> None:  # by an ExitStack
        instance.lock.__exit__(*error)


class _Passage:
    """One thread's way through the gate.

    Attributes:
        lock: Locked by the thread while it writes.
        is_held_back: Whether the thread waits for the gate to open.
    """

    __slots__ = ("is_held_back", "lock")

    __exit__ = _Release()

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_held_back = False

    def __enter__(self) -> None:
        while True:
            try:
                self.lock.acquire()  # no other thread ever does
                if not last_closing.lock.locked():
                    return
                if last_closing.is_this_threads():
                    last_closing.refuse_step()
                    return
            except BaseException:
                self.lock.release()
                raise
            self.lock.release()
            self._wait_until_open()

    def _wait_until_open(self) -> None:
        waiting = Waiting()
        self.is_held_back = True
        try:
            while (closing := last_closing).stops_this_thread():
                waiting.pause(closing.describe, closing.last_progress)
        finally:
            self.is_held_back = False


class _Closing:
    """The gate is closed while this is entered.

    Attributes:
        lock: Locked by its thread until it ends.
        last_progress: When its thread was last seen to go on.
    """

    __slots__ = (
        "_admits_steps",
        "_has_waited",
        "_purpose",
        "_thread",
        "_writes",
        "last_progress",
        "lock",
    )

    __exit__ = _Release()

    def __init__(self, purpose: str, writes: bool, admits_steps: bool) -> None:
        self._purpose = purpose
        self._writes = writes
        self._admits_steps = admits_steps
        self._has_waited = False
        self._thread = get_ident()
        self.lock = threading.Lock()
        self.last_progress = time.monotonic()

    def is_this_threads(self) -> bool:
        return self._thread == get_ident() and self.lock.locked()

    def stops_this_thread(self) -> bool:
        return self._thread != get_ident() and self.lock.locked()

    @property
    def is_done(self) -> bool:
        """Whether another thread has closed the gate, and no writer was left inside."""
        return self._has_waited and self.stops_this_thread()

    def refuse_within(self, writes: bool) -> None:
        """Raises RuntimeError if one of two is to read state while the other is to write it.

        This thread has begun one, and a signal handler has come in the middle.

        Args:
            writes: Whether the handler wants to write.
        """
        if writes or self._writes:
            self.refuse()

    def refuse(self) -> None:
        raise RuntimeError(
            f"state can be neither changed nor saved while this thread is {self._purpose}, as by a "
            "signal handler: half of it would be the old state's; do it after that"
        )

    def refuse_step(self) -> None:
        """Raises RuntimeError unless this thread may step in the middle."""
        if not self._admits_steps:
            self.refuse_within(True)

    def describe(self) -> str:
        return f"{_thread_name(self._thread)}, which is {self._purpose}"

    def __enter__(self) -> None:
        try:
            self.lock.acquire()  # nobody has seen this lock yet
            self._close()
            self.wait_for_writers()
        except BaseException:
            self.lock.release()
            raise

    def wait_for_writers(self) -> None:
        if self._has_waited:
            return
        waiting = Waiting()
        for thread, passage in _passages.copy().items():
            while thread != self._thread and passage.lock.locked():
                waiting.pause(partial(_describe_writer, thread))
        self._has_waited = True

    def _close(self) -> None:
        """Closes the gate when nobody else has closed it, and those held back had their turn."""
        global last_closing
        waiting = Waiting()
        turn_ends: float | None = None
        while True:
            with _guard:
                other = last_closing
                if other.lock.locked():
                    turn_ends = None
                elif turn_ends is None:
                    turn_ends = time.monotonic() + _TURN_S
                held_back = any(passage.is_held_back for passage in _passages.copy().values())
                if turn_ends is not None and (not held_back or time.monotonic() > turn_ends):
                    last_closing = self
                    return
            waiting.pause(other.describe, other.last_progress)


# By the thread's identifier. A new thread takes over the passage of an ended one.
_passages: dict[int, _Passage] = {}
# The last one; nobody closes the gate any more if it is not locked. Public, because each step looks
# at it: a function call would cost time.
last_closing = _Closing("doing nothing", False, False)
# For `last_closing`. Reentrant: a signal handler may save in the middle of a guarded block.
_guard = Lock("the gate")


def _new_passage() -> _Passage:
    return _passages.setdefault(get_ident(), _Passage())


def _describe_writer(thread: int) -> str:
    return f"{_thread_name(thread)}, which is in the middle of a step"


def _thread_name(thread: int) -> str:
    names = [t.name for t in threading.enumerate() if t.ident == thread]
    return f'thread "{names[0]}"' if names else f"thread {thread}"


def _forget_other_threads() -> None:
    """A forked child has none of its parent's threads but the one that forked."""
    global last_closing
    own = {thread: p for thread, p in _passages.items() if thread == get_ident()}
    _passages.clear()
    _passages.update(own)
    if not last_closing.is_this_threads():
        last_closing = _Closing("doing nothing", False, False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
