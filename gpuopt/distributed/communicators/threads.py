"""Communicators of threads of one process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gpuopt.backends import backend_for, new_storage, to_device
from gpuopt.device import Device, device_of
from gpuopt.distributed.communicator import (
    Communicator,
    RankGroup,
    ReduceOp,
    Refusal,
    check_op,
    check_root,
    name_gather,
    reduction_of,
    say_error,
    say_who,
)
from gpuopt.distributed.reduction import Mark
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, check_timeout
from gpuopt.errors import CancelledError, DeadlineExceededError, WorkerFailedError
from gpuopt.interrupts import interrupts_put_off
from gpuopt.locks import Condition, renew_after_fork
from gpuopt.variables.indexed_slices import IndexedSlices

_logger = logging.getLogger("gpuopt")


class ThreadGroup(RankGroup):
    """Ranks that are threads of this process; each `run` starts them anew."""

    def __init__(self, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Describes the group.

        Args:
            size: How many ranks there are.
            timeout_s: How long a rank waits for the others, in seconds.
        """
        if size < 1:
            raise ValueError(f"a group needs at least 1 rank, got {size}")
        self.size = self.local_size = size
        self._timeout_s = check_timeout(timeout_s)

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        meeting = _Meeting(self.size, self._timeout_s)

        def run_rank(rank: int) -> Any:
            try:
                result = function(ThreadCommunicator(rank, meeting))
            except BaseException as error:
                meeting.fail(rank, error)
                raise
            meeting.leave(rank)
            return result

        functions = [partial(run_rank, rank) for rank in range(self.size)]
        return run_threads(functions, meeting.close, self._timeout_s)


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process; `group` makes all of them."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    @classmethod
    def group(cls, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[ThreadCommunicator]:
        """Returns communicators for threads that the caller starts; `ThreadGroup` starts its own.

        Args:
            size: How many threads.
            timeout_s: How long a rank waits for the others, in seconds.
        """
        if size < 1:
            raise ValueError(f"a group needs at least 1 rank, got {size}")
        meeting = _Meeting(size, check_timeout(timeout_s))
        return [cls(rank, meeting) for rank in range(size)]

    @property
    def local(self) -> ThreadCommunicator:
        return self

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        check_op(op)
        device = device_of(array)
        reduced, mark, read = self._meeting.meet(
            self.rank,
            f"all_reduce({op!r}) of {array.dtype}{list(array.shape)}",
            (array, Mark(device)),
            partial(_reduce, op=op),
        )
        mark.follow()
        # Each rank gets a copy, to which it may write.
        own = new_storage(reduced, device, reduced.dtype)
        if any(device.kind == "gpu" for device in read):
            # The memory of `reduced` may be used again when all have copied it.
            self._end_reading([mark.device])
        return own

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        # Each rank has a list of its own.
        return list(self._meeting.meet(self.rank, what, value, list))

    def all_gather_slices(self, slices: IndexedSlices, what: str | None = None) -> IndexedSlices:
        device = slices.device
        gathered: list[tuple[IndexedSlices, Mark]] = self._meeting.meet(
            self.rank,
            name_gather(slices, what),
            (slices, Mark(device)),
            list,
        )
        for _, mark in gathered:
            mark.follow()
        backend = backend_for(device)
        with backend.enter():
            copied = IndexedSlices(
                backend.xp.concatenate([to_device(part.values, device) for part, _ in gathered]),
                backend.xp.concatenate([to_device(part.indices, device) for part, _ in gathered]),
                slices.dense_shape,
            )
            backend.hold(*(part for part, _ in gathered))
        self._end_reading(mark.device for _, mark in gathered)
        return copied

    def broadcast(self, array: Any, root: int = 0) -> Any:
        check_root(root, self.size)
        device = device_of(array)
        source, mark = self._meeting.meet(
            self.rank,
            f"broadcast from {root} of {array.dtype}{list(array.shape)}",
            (array, Mark(device)),
            lambda of_ranks: of_ranks[root],
        )
        if source is not array:
            mark.follow()
            backend = backend_for(device)
            with backend.enter():
                array[...] = to_device(source, device)
                backend.hold(source, array)
        self._end_reading([mark.device])
        return array

    def barrier(self, what: str = "barrier") -> None:
        self._meeting.meet(self.rank, what, None, lambda values: None)

    def close(self) -> None:
        """Makes all waiting and later calls of the group's ranks raise CancelledError."""
        self._meeting.close()

    def _end_reading(self, devices: Iterable[Device]) -> None:
        """Makes all ranks' later writes and frees wait for all ranks' earlier reads.

        Args:
            devices: The devices of the arrays that this rank has read.
        """
        marks = [Mark(device) for device in set(devices)]
        for of_rank in self._meeting.meet(self.rank, "end of reading", marks, list):
            for mark in of_rank:
                mark.follow()


class _Meeting:
    """Combines a value from each thread of a group, and gives the result to all of them.

    A meeting is used again and again, in rounds. It ends for good when a rank fails, does not come
    in time, or has left while others wait for it.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        """Makes a meeting of `size` threads, of which none waits longer than `timeout_s`."""
        self.size = size
        self._timeout_s = timeout_s
        self._changed = Condition("a group of ranks")
        self._brought: dict[int, tuple[str, Any]] = {}
        self._round = 0
        self._left: set[int] = set()
        self._result: Any = None
        self._round_error: Exception | None = None
        # Why the meeting has ended.
        self._end: Refusal | None = None
        self._process = os.getpid()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The ranks are threads of the parent."""
        if self._end is None:
            message = f"the ranks are threads of process {self._process}, and not of this child"
            self._end = Refusal(WorkerFailedError, message)

    def meet(self, rank: int, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Brings `value`, waits for all ranks, and returns what `combine` made of their values.

        Args:
            rank: Which rank this thread is.
            what: Describes the call; the same on all ranks.
            value: This rank's value.
            combine: Called once, by the rank that comes last, with all values in rank order.
        """
        with self._changed:
            if self._left:
                self._end_because_ranks_left()
            self._raise_end()
            round_number = self._round
            self._brought[rank] = what, value
            is_last = len(self._brought) == self.size
            if not is_last:
                in_time = self._changed.wait_for(
                    lambda: self._round != round_number or self._end is not None, self._timeout_s
                )
                if self._round != round_number:
                    return self._get_outcome()
                if not in_time:
                    self._finish(DeadlineExceededError, self._say_who_is_missing(what))
                self._raise_end()
        # Without the lock, so that the others' time limits hold while this goes on.
        result, error = self._combine(combine)
        with self._changed:
            self._raise_end()
            self._result, self._round_error = result, error
            self._brought = {}
            self._round += 1
            self._changed.notify_all()
            return self._get_outcome()

    def fail(self, rank: int, error: BaseException) -> None:
        """Makes the other ranks' waiting and later calls raise WorkerFailedError."""
        message = f"rank {rank} has failed: {type(error).__name__}: {say_error(error, str)}"
        with self._changed:
            self._finish(WorkerFailedError, message, error)

    def leave(self, rank: int) -> None:
        """Notes that a rank has finished; ranks that wait for it raise CancelledError."""
        with self._changed:
            self._left.add(rank)
            if self._brought and len(self._brought) < self.size:
                self._end_because_ranks_left()

    def close(self) -> None:
        """Makes all ranks' waiting and later calls raise CancelledError."""
        with self._changed:
            self._finish(CancelledError, "the group is closed")

    def _combine(self, combine: Callable[[list[Any]], Any]) -> tuple[Any, Exception | None]:
        calls = [self._brought[rank] for rank in range(self.size)]
        try:
            if any(what != calls[0][0] for what, _ in calls):
                made = say_who([what for what, _ in calls])
                raise ValueError(f"all ranks must make the same call, got {made}")
            return combine([value for _, value in calls]), None
        except Exception as error:
            return None, error

    def _get_outcome(self) -> Any:
        # The result is still this round's: no rank begins the next round before all have read it.
        if self._round_error is not None:
            raise self._round_error
        return self._result

    def _finish(
        self, error: type[Exception], message: str, cause: BaseException | None = None
    ) -> None:
        if self._end is None:
            self._end = Refusal(error, message, cause)
            self._changed.notify_all()

    def _end_because_ranks_left(self) -> None:
        ranks = ", ".join(map(str, sorted(self._left)))
        self._finish(CancelledError, f"rank {ranks} has finished, and will not come")

    def _raise_end(self) -> None:
        if self._end is not None:
            self._end.raise_error()

    def _say_who_is_missing(self, what: str) -> str:
        missing = [str(rank) for rank in range(self.size) if rank not in self._brought]
        if not missing:
            return f"{what} was not done within {self._timeout_s:g} s"
        return f"{what}: rank {', '.join(missing)} did not come within {self._timeout_s:g} s"


def run_threads(
    functions: Sequence[Callable[[], Any]],
    cancel: Callable[[], object],
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Runs each function in a thread of its own, and returns their results.

    Ctrl-C is raised when the threads have ended: they would go on beside what the caller does next.
    A second one does not wait for them.

    Args:
        functions: The functions to run. How long they take is not limited.
        cancel: Called after Ctrl-C, or another exception of a signal handler: has the functions
            end soon.
        timeout_s: How long to wait, after one has failed or `cancel`, for the others to notice, in
            seconds.

    Raises:
        Exception: what the first of the functions to fail raised. An error that only reports
            another thread, as failed, finished or missing, is raised only if there is no other. A
            thread that has not ended in time is abandoned, with a warning.
    """
    ended = Condition("the ends of threads")
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    num_started = 0

    def run(number: int) -> None:
        try:
            result = functions[number]()
        except BaseException as error:
            with ended:
                errors[number] = error
                ended.notify_all()
        else:
            with ended:
                results[number] = result
                ended.notify_all()

    def wait_for_all() -> None:
        if not ended.wait_for(lambda: len(errors) + len(results) >= num_started, timeout_s):
            late = sorted(set(range(len(functions))) - errors.keys() - results.keys())
            _logger.warning("threads %s have not ended within %g s", late, timeout_s)

    try:
        with interrupts_put_off():  # `Thread.start` itself can be left with another error
            for number in range(len(functions)):
                threading.Thread(target=run, args=(number,), daemon=True).start()
                num_started += 1
        with ended:
            ended.wait_for(lambda: bool(errors) or len(results) == len(functions))
    except BaseException:
        cancel()
        with ended:
            wait_for_all()
        raise
    if errors:
        with ended:
            wait_for_all()
        noticed = (CancelledError, DeadlineExceededError, WorkerFailedError)
        raise min(errors.values(), key=lambda error: isinstance(error, noticed))
    return [results[number] for number in range(len(functions))]


def _reduce(
    brought: Sequence[tuple[Any, Mark]], op: ReduceOp
) -> tuple[Any, Mark, frozenset[Device]]:
    """Reduces arrays in rank order, on the first array's device.

    Returns:
        The result; the mark of the work that computes it; and the devices of all arrays.
    """
    for _, mark in brought:
        mark.follow()
    first, *others = [array for array, _ in brought]
    device = device_of(first)
    backend = backend_for(device)
    combine = reduction_of(backend.xp, op)
    with backend.enter():
        # The only rank copies its array itself.
        total = new_storage(first, device, first.dtype) if others else first
        for array in others:
            combine(total, to_device(array, device), out=total)
        backend.hold(*others)
    return total, Mark(device), frozenset(mark.device for _, mark in brought)
