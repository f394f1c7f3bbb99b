"""Locks and waits that end: after a deadline, after Ctrl-C, and in a forked child.

A `with` statement releases a lock by the lock's own `__exit__`, which is a built-in: no signal
handler runs between its call and its effect. A `__exit__` written in Python could be interrupted
before its first line, and the lock would stay locked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from operator import attrgetter, methodcaller
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from gpuopt.errors import DeadlineExceededError

Result = TypeVar("Result")

# Without progress of whoever is waited for.
DEADLINE_S = 600.0
_SHORTEST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001
# Of one who waits to be notified.
_LONGEST_SLEEP_S = 1.0

_release = methodcaller("release")


class _Exit(property):
    """`__exit__` of a `Lock`: that of the built-in lock inside."""

    def __init__(self) -> None:
        super().__init__(attrgetter("_lock.__exit__"))

    def __call__(self, instance: Lock, *error: Any) -> None:  # by an ExitStack
        instance._lock.__exit__(*error)


class Lock:
    """A reentrant lock.

    Attributes:
        was_lost: Whether a thread held it that this process, a forked child, does not have: what
            the lock guards may be half done.
    """

    __slots__ = ("__weakref__", "_lock", "_what", "was_lost")

    __exit__ = _Exit()

    def __init__(self, what: object) -> None:
        """Makes an open lock.

        Args:
            what: What it guards, as text in the error of who waits too long.
        """
        self._what = what
        self._lock = threading.RLock()
        self.was_lost = False
        renew_after_fork(self)

    def __enter__(self) -> None:
        """Takes the lock.

        Raises:
            DeadlineExceededError: another thread does not release it.
        """
        try:
            if not self._lock.acquire(timeout=DEADLINE_S):
                self._raise_deadline_exceeded()
        except BaseException:
            # Unless the exception came first. A thread that has it already gets it again at once,
            # so that this release is never one of an outer `with`.
            with suppress(RuntimeError):
                self._lock.release()
            raise

    @property
    def is_this_threads(self) -> bool:
        """Whether this thread holds the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _raise_deadline_exceeded(self) -> None:
        raise DeadlineExceededError(
            f"waited {DEADLINE_S:g} s for another thread to release the lock of {self._what}"
        )

    def after_fork(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or this thread's own
            self._lock.release()
        else:
            self._lock = threading.RLock()
            self.was_lost = True


class Condition(Lock):
    """A lock whose holder can wait for another thread to change what it guards."""

    __slots__ = ("_condition",)

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._condition = threading.Condition(self._lock)

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Lets the lock go until `predicate()` holds; returns whether it does in the end."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while not (holds := predicate()):
            left = _LONGEST_SLEEP_S if ends is None else ends - time.monotonic()
            if left <= 0:
                break
            try:
                # Not longer: a notice gets lost if Ctrl-C ends the thread that was to give it.
                self._condition.wait(min(left, _LONGEST_SLEEP_S))
            except BaseException:
                if not self.is_this_threads:
                    # The exception came between the release and Python's note to take it again.
                    self._lock.acquire(timeout=DEADLINE_S)
                raise
        return holds

    def notify_all(self) -> None:
        """Has those who wait look again."""
        self._condition.notify_all()

    def after_fork(self) -> None:
        super().after_fork()
        # Those who waited are threads that this process does not have.
        self._condition = threading.Condition(self._lock)


def call_locked(locks: Sequence[Lock], call: Callable[[], Result]) -> Result:
    """Holds locks while `call` runs, and returns its result.

    Holds none of them while it waits for another, so that two threads may give them in any order.

    Raises:
        DeadlineExceededError: another thread does not release one of them.
    """
    results: list[Result] = []

    def call_if_taken(taken: Sequence[bool]) -> Lock | None:
        if not all(taken):
            return locks[taken.index(False)]
        results.append(call())
        return None

    inner = [lock._lock for lock in locks]
    while busy := _call_holding(inner, methodcaller("acquire", blocking=False), call_if_taken):
        with busy:
            pass  # it was waited for
    return results[0]


def call_if_free(lock: Lock, call: Callable[[], object]) -> bool:
    """Holds a lock while `call` runs, unless another thread holds it; returns whether it ran."""

    def call_if_taken(taken: Sequence[bool]) -> bool:
        if taken[0]:
            call()
        return taken[0]

    return _call_holding([lock._lock], methodcaller("acquire", blocking=False), call_if_taken)


def _call_holding(
    locks: Sequence[Any],
    take: Callable[[Any], bool],
    call: Callable[[Sequence[bool]], Result],
) -> Result:
    """Takes locks, calls `call` with whether each was taken, and releases those that were."""
    taken: list[bool] = []
    # As far as `taken` has grown by then.
    releases = map(_release, compress(locks, taken))
    try:
        # Built-ins alone: no signal handler runs between a lock's taking and its note.
        taken.extend(map(take, locks))
        return call(taken)
    finally:
        list(releases)


class Waiting:
    """One wait for something that is looked at again and again."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._pause_s = _SHORTEST_PAUSE_S

    @property
    def is_short(self) -> bool:
        """Whether it has not lasted longer than a pause may."""
        return time.monotonic() - self._began < _LONGEST_PAUSE_S

    def pause(self, describe: Callable[[], str], last_progress: float = 0.0) -> None:
        """Sleeps for a moment.

        Args:
            describe: Returns what is waited for, for the error.
            last_progress: When that was last seen to go on.

        Raises:
            DeadlineExceededError: it has not gone on for too long.
        """
        if time.monotonic() - max(self._began, last_progress) > DEADLINE_S:
            raise DeadlineExceededError(f"waited {DEADLINE_S:g} s for {describe()}")
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class SharedByThreads(Protocol):
    """Something that threads may leave half done when a child is forked."""

    def after_fork(self) -> None:
        """Called in the child, whose only thread is the one that forked."""


_shared: WeakSet[SharedByThreads] = WeakSet()


def renew_after_fork(shared: SharedByThreads) -> None:
    """Has `after_fork` of this object called in each forked child, for as long as it lives."""
    _shared.add(shared)


def _renew_all() -> None:
    for shared in list(_shared):
        shared.after_fork()


# Held by imports in the middle of a call. Python's own lock of a module that another thread is
# importing stays locked in a forked child, so a fork waits until such an import is done.
importing = Lock("imports")
_LONGEST_IMPORT_S = 60.0


def _hold_imports_back() -> None:
    # Not for ever: the other thread's import may itself wait for one of the thread that forks.
    importing._lock.acquire(timeout=_LONGEST_IMPORT_S)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
    # The built-in itself: Ctrl-C before the first line of a function would leave the lock locked.
    # Python reports its error, and goes on, if the import took too long.
    _let_imports_go_on = importing._lock.release
    os.register_at_fork(
        before=_hold_imports_back,
        after_in_parent=_let_imports_go_on,
        after_in_child=_let_imports_go_on,
    )
