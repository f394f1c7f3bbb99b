"""Communicators within one process: a single rank, or one rank per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from gpuopt.backends import backend_for, moved, stored
from gpuopt.device import device_of
from gpuopt.distributed.communicator import Communicator, ReduceOp
from gpuopt.distributed.reduction import Mark
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S, checked_timeout
from gpuopt.errors import CancelledError, DeadlineExceededError, WorkerFailedError
from gpuopt.indexed_slices import IndexedSlices


class SingleCommunicator(Communicator):
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        _checked_op(op)
        return array.copy()

    def all_gather_slices(self, slices: IndexedSlices) -> IndexedSlices:
        return slices

    def broadcast(self, array: Any, root: int = 0) -> Any:
        _checked_root(root, self.size)
        return array

    def barrier(self) -> None:
        pass


class Meeting:
    """Where the threads of a group bring one thing each, and all take away what becomes of them."""

    def __init__(self, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Makes a place for `size` threads, of which none waits longer than `timeout_s` seconds."""
        if size < 1:
            raise ValueError(f"a group needs at least 1 rank, got {size}")
        self.size = size
        self._timeout_s = checked_timeout(timeout_s)
        self._changed = threading.Condition(threading.Lock())
        self._brought: dict[int, tuple[str, Any]] = {}
        self._round = 0
        self._left: set[int] = set()
        self._result: Any = None
        self._round_error: Exception | None = None
        # What ends the group: the error's type, message and cause. Each rank raises its own.
        self._end: tuple[type[Exception], str, BaseException | None] | None = None

    def meet(self, rank: int, what: str, thing: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Brings `thing`, waits for all ranks, and returns what `combine` made of all things.

        Args:
            rank: Who comes.
            what: Which call this is, the same on all ranks.
            thing: What is brought.
            combine: Called once, by the rank that comes last, with all things in rank order.
        """
        with self._changed:
            if self._left:
                self._refuse_the_left()
            self._raise_end()
            round_number = self._round
            self._brought[rank] = what, thing
            is_last = len(self._brought) == self.size
            if not is_last:
                in_time = self._changed.wait_for(
                    lambda: self._round != round_number or self._end is not None, self._timeout_s
                )
                if self._round != round_number:
                    return self._outcome()
                if not in_time:
                    self._finish(DeadlineExceededError, self._who_is_missing(what))
                self._raise_end()
        # Without the lock, so that the others' time limits hold while this goes on.
        result, error = self._combined(combine)
        with self._changed:
            self._raise_end()
            self._result, self._round_error = result, error
            self._brought = {}
            self._round += 1
            self._changed.notify_all()
            return self._outcome()

    def fail(self, rank: int, error: BaseException) -> None:
        """Lets the other ranks raise WorkerFailedError, now and later."""
        message = f"rank {rank} has failed: {type(error).__name__}: {error}"
        with self._changed:
            self._finish(WorkerFailedError, message, error)

    def leave(self, rank: int) -> None:
        """Says that a rank has finished: who still waits for it raises CancelledError."""
        with self._changed:
            self._left.add(rank)
            if self._brought and len(self._brought) < self.size:
                self._refuse_the_left()

    def close(self) -> None:
        """Lets all ranks raise CancelledError, now and later."""
        with self._changed:
            self._finish(CancelledError, "the group is closed")

    def _combined(self, combine: Callable[[list[Any]], Any]) -> tuple[Any, Exception | None]:
        calls = [self._brought[rank] for rank in range(self.size)]
        try:
            if any(what != calls[0][0] for what, _ in calls):
                raise ValueError(
                    f"all ranks must make the same call, got {[what for what, _ in calls]}"
                )
            return combine([thing for _, thing in calls]), None
        except Exception as error:
            return None, error

    def _outcome(self) -> Any:
        # No rank can be in the next round yet while another has not read the result of this one.
        if self._round_error is not None:
            raise self._round_error
        return self._result

    def _finish(
        self, error: type[Exception], message: str, cause: BaseException | None = None
    ) -> None:
        if self._end is None:
            self._end = error, message, cause
            self._changed.notify_all()

    def _refuse_the_left(self) -> None:
        ranks = ", ".join(map(str, sorted(self._left)))
        self._finish(CancelledError, f"rank {ranks} has finished, and will not come")

    def _raise_end(self) -> None:
        if self._end is not None:
            error, message, cause = self._end
            raise error(message) from cause

    def _who_is_missing(self, what: str) -> str:
        missing = [str(rank) for rank in range(self.size) if rank not in self._brought]
        if not missing:
            return f"{what} was not done within {self._timeout_s:g} s"
        return f"{what}: rank {', '.join(missing)} did not come within {self._timeout_s:g} s"


class ThreadCommunicator(Communicator):
    """A rank that is a thread of this process; `group` makes all of them."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = meeting.size
        self.meeting = meeting

    @classmethod
    def group(cls, size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[ThreadCommunicator]:
        """Returns one communicator for each of `size` threads.

        Args:
            size: How many threads.
            timeout_s: How long a rank waits for the others, in seconds.
        """
        meeting = Meeting(size, timeout_s)
        return [cls(rank, meeting) for rank in range(size)]

    def all_reduce(self, array: Any, op: ReduceOp = "sum") -> Any:
        _checked_op(op)
        what = f"all_reduce({op!r}) of {array.dtype}{list(array.shape)}"
        brought = array, Mark(device_of(array))
        reduced, mark = self.meeting.meet(self.rank, what, brought, lambda all_: _reduce(all_, op))
        mark.follow()
        # Each rank has its own: what one writes into it the others do not see.
        return stored(reduced, device_of(array), reduced.dtype)

    def all_gather_slices(self, slices: IndexedSlices) -> IndexedSlices:
        rows = f"{slices.dtype}[:, {list(slices.values.shape[1:])}]"
        device = slices.device
        gathered: list[tuple[IndexedSlices, Mark]] = self.meeting.meet(
            self.rank, f"all_gather_slices of {rows}", (slices, Mark(device)), list
        )
        for _, mark in gathered:
            mark.follow()
        backend = backend_for(device)
        with backend.active():
            copied = IndexedSlices(
                backend.xp.concatenate([moved(part.values, device) for part, _ in gathered]),
                backend.xp.concatenate([moved(part.indices, device) for part, _ in gathered]),
                slices.dense_shape,
            )
        # The others may write into their gradients again once all have read them.
        self.barrier()
        return copied

    def broadcast(self, array: Any, root: int = 0) -> Any:
        _checked_root(root, self.size)
        what = f"broadcast from {root} of {array.dtype}{list(array.shape)}"
        device = device_of(array)
        brought = array, Mark(device)
        source, mark = self.meeting.meet(self.rank, what, brought, lambda all_: all_[root])
        if source is not array:
            mark.follow()
            with backend_for(device).active():
                array[...] = moved(source, device)
        self.barrier()
        return array

    def barrier(self) -> None:
        self.meeting.meet(self.rank, "barrier", None, lambda things: None)

    def close(self) -> None:
        """Lets all ranks of the group raise CancelledError, now and later."""
        self.meeting.close()


def run_threads(
    functions: Sequence[Callable[[], Any]], timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Runs each function in a thread of its own, and returns their results.

    Args:
        functions: What to run.
        timeout_s: How long to wait, after one has failed, for the others to notice, in seconds.

    Raises:
        Exception: what the first of them raised; those that only noticed another's failure count
            last. A thread that has not ended in time by then is left behind.
    """
    ended = threading.Condition(threading.Lock())
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

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

    for number in range(len(functions)):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    with ended:
        ended.wait_for(lambda: bool(errors) or len(results) == len(functions))
        if errors:
            ended.wait_for(lambda: len(errors) + len(results) == len(functions), timeout_s)
            noticed = (CancelledError, DeadlineExceededError, WorkerFailedError)
            raise min(errors.values(), key=lambda error: isinstance(error, noticed))
    return [results[number] for number in range(len(functions))]


def _reduce(brought: Sequence[tuple[Any, Mark]], op: ReduceOp) -> tuple[Any, Mark]:
    for _, mark in brought:
        mark.follow()
    first, *others = [array for array, _ in brought]
    device = device_of(first)
    backend = backend_for(device)
    combine = {"sum": backend.xp.add, "min": backend.xp.minimum, "max": backend.xp.maximum}[op]
    with backend.active():
        total = stored(first, device, first.dtype)
        for array in others:
            combine(total, moved(array, device), out=total)
    return total, Mark(device)


def _checked_op(op: str) -> None:
    if op not in ("sum", "min", "max"):
        raise ValueError(f'op must be "sum", "min" or "max", got {op!r}')


def _checked_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root}")
