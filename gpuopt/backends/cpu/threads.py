"""The threads that share large updates in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

Task = TypeVar("Task")

# A few threads use all of the memory's bandwidth, and numpy's calls share one interpreter lock.
_MOST_BY_DEFAULT = 8


def num_threads() -> int:
    """Returns how many threads a large update uses.

    GPUOPT_THREADS says so; by default, one for each core that this process may use, up to 8.

    Raises:
        ValueError: GPUOPT_THREADS is not a whole number of at least 1.
    """
    wanted = os.environ.get("GPUOPT_THREADS", "")
    if not wanted:
        return min(_cores(), _MOST_BY_DEFAULT)
    if not wanted.isdecimal() or int(wanted) < 1:
        raise ValueError(f"GPUOPT_THREADS={wanted!r} is not a whole number of at least 1")
    return int(wanted)


def share_out(work: Callable[[Task], object], tasks: Iterable[Task], threads: int) -> None:
    """Calls `work` on each task, in this thread and up to `threads - 1` others.

    Returns when all tasks are done. The calling thread waits for no other to begin, so that any
    number of threads may share out at once. Floating-point errors raise no warning in any thread.

    Raises:
        Exception: what `work` raised first; tasks not yet begun are dropped.
    """
    queue: SimpleQueue[Task] = SimpleQueue()
    for task in tasks:
        queue.put(task)

    def work_on() -> None:
        with np.errstate(all="ignore"):
            try:
                while True:
                    work(queue.get_nowait())
            except Empty:
                return
            except BaseException:
                _drop(queue)
                raise

    others = _start(work_on, min(threads, queue.qsize()) - 1)
    try:
        work_on()
    finally:
        begun = [other for other in others if not other.cancel()]
        errors = [other.exception() for other in begun]
    for error in errors:
        if error is not None:
            raise error


def _start(work: Callable[[], None], threads: int) -> list[Future[None]]:
    started: list[Future[None]] = []
    try:
        while len(started) < threads:
            started.append(_pool(threads).submit(work))
    except RuntimeError:  # the interpreter is shutting down, and starts no more threads
        pass
    return started


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "gpuopt")


def _drop(queue: SimpleQueue[Any]) -> None:
    try:
        while True:
            queue.get_nowait()
    except Empty:
        return


@cache
def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# A forked child has none of its parent's threads; it makes its own pool. Its cores may be others.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
    os.register_at_fork(after_in_child=_cores.cache_clear)
