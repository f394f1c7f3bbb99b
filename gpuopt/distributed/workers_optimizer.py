"""Optimizers for workers with a coordinator, in threads or processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from gpuopt.distributed.chief import Chief
from gpuopt.distributed.chief_messages import CHIEF, LOOK_S, End, SharedVariables
from gpuopt.distributed.communicator import Communicator, MessagingCommunicator, RankGroup
from gpuopt.distributed.coordinator import Coordinator, failure_of
from gpuopt.distributed.remote_coordinator import RemoteCoordinator
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.wrapper import (
    OptimizerWrapper,
    check_inside_of_workers,
    inner_optimizers,
)
from gpuopt.errors import CancelledError, GpuoptError, WorkerFailedError
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Condition, Lock, call_if_free
from gpuopt.optimizer import Optimizer
from gpuopt.step.request import StepRequest
from gpuopt.step.step import checked_global_step
from gpuopt.step.updates import dtypes_of, pairs_for
from gpuopt.step.wide_gradients import GradientTypes, widened
from gpuopt.variables.variable import Variable

_logger = logging.getLogger("gpuopt")


class ThisThread(threading.local):
    """What a thread does with an optimizer.

    Attributes:
        worker: Whose `with` statement the thread is in, if any.
    """

    worker: Worker | None = None


class WorkersOptimizer(OptimizerWrapper):
    """Base of optimizers whose coordinator takes the gradients of several workers.

    A subclass makes the coordinator, and a `Worker` for each index.
    """

    is_for_workers = True

    def __init__(self, opt: Optimizer, use_locking: bool, name: str) -> None:
        """Wraps `opt`.

        Raises:
            TypeError: `opt` is no optimizer.
            ValueError: `opt` is for workers itself.
        """
        # First, as another thread may save as soon as this optimizer is listed among the living.
        self._optimizer = check_inside_of_workers(opt, type(self).__name__)
        super().__init__(use_locking, name)
        self._coordinator: Coordinator | None = None
        self._running = Lock(f'the workers of "{name}"')
        self._this_thread = ThisThread()

    @property
    def _inner(self) -> Optimizer:
        return self._optimizer

    def _make_worker(self, coordinator: Any, index: int) -> Worker:
        raise NotImplementedError

    def _close_last(self) -> None:
        """Makes sure that no coordinator of this optimizer is open.

        Raises:
            RuntimeError: the coordinator started before is still open.
        """
        last = self._coordinator
        if last is not None and last.belongs_to_run:
            # Ctrl-C may have ended that run before it has closed its coordinator.
            call_if_free(self._running, last.close)
        if last is not None and not last.is_closed:
            raise RuntimeError(f'"{self._name}" is started already; close its coordinator first')

    def _run_workers(
        self,
        train: Callable[[Any], Any],
        global_step: Any,
        num_workers: int,
        *,
        check: Callable[[], object],
        open_coordinator: Callable[[], Coordinator],
        same: Mapping[str, object],
        more_variables: Mapping[str, Variable],
        timeout_s: float,
        group: RankGroup | None,
        stop: StopRequest | None,
    ) -> Coordinator:
        """Runs `train(worker)` for every worker, each in its own thread, or its own process.

        Args:
            train: The function of a worker.
            global_step: The variable that counts steps.
            num_workers: How many workers there are.
            check: Raises what `open_coordinator` would raise.
            open_coordinator: Makes the coordinator, and keeps it in `_coordinator`; not called in
                processes of workers.
            same: What else must be the same in all processes, by name.
            more_variables: Variables that follow the chief's, too, and are not trainable, by names
                of their own.
            timeout_s: How long a worker waits for its token, in seconds.
            group: The processes; by default each worker is a thread of this one.
            stop: Ends the training when a signal comes.

        Returns:
            The coordinator, closed, with its figures.
        """
        finished: list[Coordinator] = []

        def run_rank(communicator: Communicator) -> Coordinator:
            """Does one process's part of a run: the chief's, or a worker's."""
            if not isinstance(communicator, MessagingCommunicator):
                raise TypeError(
                    f'"{self._name}" needs a group of processes that send each other messages, as '
                    f"MPIGroup; got one of {type(communicator).__name__}. Workers are threads if "
                    "no group is given"
                )
            step = checked_global_step(global_step)
            shared = SharedVariables(
                communicator, step, same, more_variables, f"the start of {type(self).__name__}.run"
            )
            if communicator.size != num_workers + 1:
                raise ValueError(
                    f'"{self._name}" has {num_workers} workers and a chief, so it needs '
                    f"{num_workers + 1} ranks; the group has {communicator.size}"
                )
            if communicator.rank == CHIEF:
                coordinator = open_coordinator()
                valid_dtypes = dtypes_of(self)
                Chief(communicator, coordinator, shared, valid_dtypes, timeout_s, stop).serve()
                return coordinator
            check()
            self._close_last()
            self._coordinator = remote = RemoteCoordinator(
                communicator,
                shared,
                stop,
                type(self).__name__,
                step,
                total_num_replicas=num_workers,
                timeout_s=timeout_s,
            )
            make_worker = partial(self._make_worker, remote)
            _run_in_process(train, make_worker, remote, communicator.rank - 1)
            return remote

        def run() -> None:
            if group is not None:
                finished.extend(group.run(run_rank))
            else:
                coordinator = open_coordinator()
                # Not of `self._coordinator`, the next run's if Ctrl-C has ended this one.
                make_worker = partial(self._make_worker, coordinator)
                _run_in_threads(train, make_worker, coordinator, timeout_s, stop)
                finished.append(coordinator)
            # They refer to each other: until Python's collector came, all variables would stay.
            self._coordinator = None

        if self._running.is_this_threads or not call_if_free(self._running, run):
            raise RuntimeError(f'"{self._name}" is started already; wait for the end of its run')
        return finished[0]


class Worker(OptimizerWrapper):
    """One worker's end: an optimizer whose `apply_gradients` hands gradients to the coordinator.

    Use it in a `with` statement: at its end, also by an exception, the other workers stop waiting
    for this one.

    Attributes:
        index: Which worker, from 0.
        local_step: The step that the worker's next gradients count for.
    """

    is_for_workers = True

    def __init__(self, owner: WorkersOptimizer, coordinator: Coordinator, index: int) -> None:
        self._owner = owner  # first, as in WorkersOptimizer
        super().__init__(owner._use_locking, owner.get_name())
        self._coordinator = coordinator
        self.index = index
        self.local_step = coordinator.join(index)

    @property
    def _inner(self) -> Optimizer:
        return self._owner

    @property
    def global_step(self) -> Variable:
        """The variable that counts steps."""
        return self._coordinator.global_step

    def _push(self, request: StepRequest) -> None:
        """Hands gradients to the coordinator, and waits until this worker may go on."""
        coordinator = self._coordinator
        if (
            checked_global_step(request.global_step).identity
            is not coordinator.global_step.identity
        ):
            raise ValueError(
                f'global_step must be "{coordinator.global_step.name}", with which the coordinator '
                "was started"
            )
        pairs = pairs_for(self, request.pairs)
        if self._gradient_types is not GradientTypes.OWN:  # all workers' alike
            pairs = [(widened(*pair), pair[1]) for pair in pairs]
        ticket = coordinator.push(self.index, self.local_step, pairs, request)
        self.local_step = coordinator.wait(ticket)

    def __enter__(self) -> Self:
        self._owner._this_thread.worker = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner._this_thread.worker = None
        self._coordinator.leave(self.index, error)


def raise_refusal(optimizer: Optimizer) -> None:
    """Raises what `on_nonfinite="raise"` refuses of a worker's step; else another worker would.

    The host waits for a GPU that decides, as it does for the global step, which is read next.
    """
    if any(each._on_nonfinite == "raise" for each in inner_optimizers(optimizer)):
        optimizer.check()


def check_counter(global_step: Any, why: str) -> Variable:
    """Returns the variable that counts steps.

    Raises:
        TypeError: it is no scalar integer variable, as it must be because of `why`.
    """
    step = checked_global_step(global_step)
    if step.dtype.kind not in "iu":
        raise TypeError(
            f'global_step "{step.name}" must be an integer to {why}, got dtype {step.dtype}'
        )
    return step


def _run_in_threads(
    train: Callable[[Any], Any],
    make_worker: Callable[[int], Worker],
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


def _run_in_process(
    train: Callable[[Any], Any],
    make_worker: Callable[[int], Worker],
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
