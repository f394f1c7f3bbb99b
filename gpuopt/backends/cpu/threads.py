"""The threads that share large updates in host memory."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

from gpuopt import environment, locks
from gpuopt.backends.cpu.cores import num_usable_cores
from gpuopt.errors import DeadlineExceededError
from gpuopt.fp_warnings import ignore_fp_warnings

Task = TypeVar("Task")

# A few threads use all of the memory's bandwidth, and numpy's calls share one interpreter lock.
_MOST_BY_DEFAULT = 8


def num_threads() -> int:
    """Returns how many threads a large update uses.

    GPUOPT_THREADS sets it; the default is one for each core that can run this process, up to 8.

    Raises:
        ValueError: an environment variable is malformed.
    """
    return environment.settings().threads or min(_num_cores(), _MOST_BY_DEFAULT)


def share_out(work: Callable[[Task], object], tasks: Iterable[Task], threads: int) -> None:
    """Calls `work` on each task, in this thread and up to `threads - 1` others.

    Returns when all tasks are done, and raises when no thread works on one any more; `work` is kept
    by none of them. The calling thread waits for no other to begin, so that any number of threads
    may share out at once. Floating-point errors raise no warning in any thread.

    Raises:
        Exception: what `work` raised first; tasks not yet begun are dropped.
        DeadlineExceededError: another thread does not end its task.
        RuntimeError: this process was forked meanwhile, and the tasks of other threads are lost.
    """
    shared = _SharedTasks(work, tasks)
    try:
        _helpers.call(shared.help, min(threads, shared.left.qsize()) - 1)
        shared.work_on()
        shared.wait()
    except BaseException as error:  # noqa: F841 - also Ctrl-C, at any moment
        while not shared.is_over:
            try:
                shared.drop()
                shared.wait()
            except BaseException as later:  # Ctrl-C again: other threads still write
                error = later
        raise error
    finally:
        # Lets go of what the work holds: a thread may come to help much later, or never.
        shared.work = _nothing_left
    if shared.errors:
        raise shared.errors[0]


@cache
def _num_cores() -> int:
    return num_usable_cores()


def _nothing_left(task: object) -> None:
    raise AssertionError("all tasks were taken or dropped")


class _SharedTasks:
    """Tasks that several threads take from one queue.

    Attributes:
        left: Tasks not yet begun.
        work: The function that is called with each task.
        errors: Errors that helping threads have raised.
        is_over: Whether a wait has come to its end: no thread works on a task, or one takes too
            long, or is none of this process.
    """

    def __init__(self, work: Callable[[Any], object], tasks: Iterable[Any]) -> None:
        self.left: SimpleQueue[Any] = SimpleQueue()
        for task in tasks:
            self.left.put(task)
        self.work = work
        self.errors: list[BaseException] = []
        self.is_over = False
        self._process = os.getpid()
        # A lock for each helping thread, held as long as it may work on a task. Reentrant: a wait
        # that Ctrl-C ends just after it has taken one is repeated.
        self._helping: list[Any] = []

    def work_on(self) -> None:
        """Works until no task is left."""
        try:
            ignore_fp_warnings(self._work_on)
        except Empty:
            return
        except BaseException:
            self.drop()
            raise

    def _work_on(self) -> NoReturn:
        while True:
            self.work(self.left.get_nowait())

    def help(self) -> None:
        """Does the same in another thread, which may come too late to find a task."""
        lock = threading.RLock()
        with lock:
            self._helping.append(lock)
            try:
                self.work_on()
            except BaseException as error:
                self.errors.append(error)

    def drop(self) -> None:
        """Takes away the tasks that are not begun."""
        try:
            while True:
                self.left.get_nowait()
        except Empty:
            return

    def wait(self) -> None:
        """Waits until no thread works on a task; no task is left by now."""
        began = time.monotonic()
        self.is_over = False
        for lock in self._helping:
            # For a second at a time: a signal handler may fork in this wait.
            while self._check_process() and not lock.acquire(timeout=1.0):
                if time.monotonic() - began > locks.DEADLINE_S:
                    self.is_over = True
                    raise DeadlineExceededError(
                        f"waited {locks.DEADLINE_S:g} s for a thread that shares an update"
                    )
        self.is_over = True

    def _check_process(self) -> bool:
        if os.getpid() != self._process and self._helping:
            self.is_over = True
            raise RuntimeError(
                f"this process was forked from process {self._process} in the middle of an update "
                "that threads shared: what they updated there is unknown here"
            )
        return True


class _Helpers:
    """Threads that wait for something to help with.

    concurrent.futures would do, but for Ctrl-C in its `submit`, which may leave a lock locked.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = 0

    def call(self, function: Callable[[], None], times: int) -> None:
        """Has `function` be called so many times, each in a thread, as soon as one is idle."""
        try:
            while self._num_threads < times:
                _thread.start_new_thread(self._help, ())
                self._num_threads += 1
        except RuntimeError:  # the interpreter is shutting down, or there are too many threads
            pass
        for _ in range(min(times, self._num_threads)):
            self._calls.put(function)

    def _help(self) -> None:
        while True:
            # Without a deadline: this thread has nothing else to do, and ends with the process.
            self._calls.get()()


_helpers = _Helpers()


def _forget_threads() -> None:
    """A forked child has none of its parent's threads. Its cores may be others."""
    global _helpers
    _helpers = _Helpers()
    _num_cores.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
