"""Runs an optimizer's workers: in threads, or one in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from gpuopt.distributed.chief_messages import LOOK_S, End
from gpuopt.distributed.coordinator import Coordinator, failure_of
from gpuopt.distributed.remote_coordinator import RemoteCoordinator
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.errors import CancelledError, GpuoptError, WorkerFailedError
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Condition

Worker = TypeVar("Worker")

_logger = logging.getLogger("gpuopt")


def run_in_threads(
    train: Callable[[Worker], Any],
    make_worker: Callable[[int], AbstractContextManager[Worker]],
    coordinator: Coordinator,
    timeout_s: float,
    stop: StopRequest | None,
) -> None:
    """Calls `train` for each worker in a thread of its own; see `SyncReplicasOptimizer.run`.

    Args:
        train: The function of a worker.
        make_worker: Makes the worker of an index.
        coordinator: Newly opened; closed in the end.
        timeout_s: How long the threads have to end when training is over, in seconds.
        stop: Ends the training when a signal comes.

    Raises:
        Exception: what a worker raised, if the others could not do without it.
    """
    total, needed = coordinator.total_num_replicas, coordinator.num_workers_needed
    num_finished = 0
    changed = Condition("the ends of workers")
    ended: set[int] = set()
    failures: list[BaseException] = []

    def work(index: int) -> None:
        nonlocal num_finished
        failure: BaseException | None = None
        try:
            with make_worker(index) as worker:
                train(worker)
        except BaseException as error:
            failure = failure_of(error)
        with changed:
            ended.add(index)
            others = total - len(ended), num_finished
            if failure is None:
                num_finished += 1
            elif coordinator.has_failed or not coordinator.can_go_on_with(*others):
                failures.append(failure)
            else:
                _warn_of_failure(index, failure)
            changed.notify_all()

    num_started = 0
    try:
        with coordinator:
            with interrupts_put_off():  # `Thread.start` itself can be left with another error
                for index in range(total):
                    threading.Thread(target=work, args=(index,), daemon=True).start()
                    num_started += 1
            with changed:
                look_s = None if stop is None else LOOK_S
                while not changed.wait_for(lambda: total - len(ended) < needed, look_s):
                    if stop is not None and stop.has_come:
                        break
            if stop is not None and stop.has_come:
                coordinator.stop()
            with changed:
                changed.wait_for(lambda: len(ended) == total, timeout_s)
                late = sorted(set(range(total)) - ended)
    except BaseException:  # of a signal handler: workers are not to go on beside what comes next
        with changed:
            changed.wait_for(lambda: len(ended) >= num_started, timeout_s)
        raise
    if late:
        _logger.warning("workers %s have not ended within %g s", late, timeout_s)
    if failures:
        raise min(failures, key=lambda error: isinstance(error, GpuoptError))


def run_in_process(
    train: Callable[[Worker], Any],
    make_worker: Callable[[int], AbstractContextManager[Worker]],
    coordinator: RemoteCoordinator,
    index: int,
) -> None:
    """Calls `train` for this process's worker, and waits until all of the training is over.

    Args:
        train: The function of a worker.
        make_worker: Makes the worker of an index.
        coordinator: Newly opened; closed in the end.
        index: Of the worker.

    Raises:
        Exception: what the worker raised, if the others could not do without it.
        WorkerFailedError: another one has failed, and this one could not do without it.
    """
    failure: Exception | None = None
    end: End | None = None
    with coordinator:
        try:
            with make_worker(index) as worker:
                train(worker)
        except CancelledError:
            pass  # the training is over
        except Exception as error:
            failure = error
        try:
            end = coordinator.wait_for_end(index)
        except GpuoptError:
            if failure is None:
                raise
    if failure is None:
        if end is not None and end.failure is not None:
            raise WorkerFailedError(end.failure)
    elif end is None or end.failure is not None:
        raise failure
    else:
        _warn_of_failure(index, failure)


def _warn_of_failure(index: int, failure: BaseException) -> None:
    _logger.warning("worker %d failed: %r", index, failure, exc_info=failure)
