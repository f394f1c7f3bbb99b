"""Coordinator: the state of a training by workers, from their start to its end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuopt.distributed.communicator import Refusal, say_error
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.tokens import Ticket
from gpuopt.distributed.waiting import check_timeout
from gpuopt.errors import CancelledError, GpuoptError, WorkerFailedError
from gpuopt.locks import Condition, renew_after_fork
from gpuopt.step.request import StepRequest
from gpuopt.variables.row_changes import register
from gpuopt.variables.variable import Variable

_logger = logging.getLogger("gpuopt")


@dataclass
class WorkerFigures:
    """Counts of what one worker has done so far.

    Attributes:
        accepted: How many of its gradients went into a step, be it applied or skipped.
        stale: How many came too late and were dropped.
        waited_s: How long it has waited for its tokens, in seconds.
    """

    accepted: int = 0
    stale: int = 0
    waited_s: float = 0.0


class Coordinator:
    """Takes the gradients of workers, which train the same variables.

    A worker joins, and leaves in the end. In between it pushes its gradients of all variables at
    once, takes a ticket, and waits until the ticket has a token: the step that its next gradient is
    for. A subclass says what becomes of gradients, and when there are tokens.

    Attributes:
        global_step: The variable that counts steps.
        total_num_replicas: How many workers there are.
        belongs_to_run: Whether an optimizer's `run` has opened it, and closes it.
        was_stopped: Whether a signal has ended the training; see `StopRequest`.
    """

    def __init__(
        self,
        global_step: Variable,
        *,
        total_num_replicas: int,
        timeout_s: float,
        belongs_to_run: bool = False,
    ) -> None:
        """Opens the coordinator. A subclass has what `variables` needs before.

        Args:
            global_step: A scalar integer variable.
            total_num_replicas: How many workers there are.
            timeout_s: How long a worker waits for its token, in seconds.
            belongs_to_run: See `Coordinator`.
        """
        self.global_step = global_step
        self.total_num_replicas = total_num_replicas
        self.belongs_to_run = belongs_to_run
        self.was_stopped = False
        self._timeout_s = check_timeout(timeout_s)
        self._changed = Condition("a coordinator of workers")
        self._figures = [WorkerFigures() for _ in range(total_num_replicas)]
        self._threads: dict[int, threading.Thread] = {}
        self._left: dict[int, BaseException | None] = {}
        self._updating: set[int] = set()  # the workers whose pushes update the variables
        self._end: Refusal | None = None
        self._process = os.getpid()
        register(self)
        renew_after_fork(self)

    def after_fork(self) -> None:
        """The workers are the parent's: here nothing could be completed."""
        self._updating.clear()
        if self._end is None:
            message = f"the workers belong to process {self._process}, and not to this child"
            self._end = Refusal(WorkerFailedError, message)

    @property
    def variables(self) -> list[Variable]:
        """The trained variables: known once the first gradients were pushed."""
        raise NotImplementedError

    @property
    def num_workers_needed(self) -> int:
        """How many workers must be there to complete steps."""
        raise NotImplementedError

    def can_go_on_with(self, num_present: int, num_finished: int) -> bool:
        """Returns whether the training is as good without a worker that has failed.

        Of the others, `num_present` are there, and `num_finished` have ended without a failure.
        """
        return num_present >= self.num_workers_needed

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or an update has failed."""
        return self._end is not None

    @property
    def has_failed(self) -> bool:
        """Whether an update has failed, so that nobody can go on."""
        return self._end is not None and self._end.kind is WorkerFailedError

    def refuse_row_changes(self, variables: Sequence[Variable]) -> None:
        for each in () if self.is_closed else self.variables:
            if each in variables:
                raise ValueError(
                    f'the rows of "{each.name}" stay as they are while workers train it, whose '
                    "gradients are on their way: change them when the workers have ended, before "
                    "the next start() or run()"
                )

    def figures(self) -> list[WorkerFigures]:
        """Returns what each worker has done so far, by its index."""
        with self._changed:
            return [replace(figures) for figures in self._figures]

    def join(self, worker: int) -> int:
        """Registers a worker; returns the step that its first gradient is for.

        Raises:
            ValueError: the worker is there already.
        """
        with self._changed:
            self._raise_end()
            thread = self._threads.get(worker)
            if thread is not None and worker not in self._left and thread.is_alive():
                raise ValueError(f"worker {worker} is there already, in {thread.name}")
            self._left.pop(worker, None)
            self._threads[worker] = threading.current_thread()
            return self._first_token()

    def leave(self, worker: int, error: BaseException | None = None) -> None:
        """Notes that a worker has ended, with the error that ended it, if any; see `failure_of`."""
        with self._changed:
            self._left[worker] = failure_of(error)

    def push(
        self, worker: int, local_step: int, pairs: Pairs, request: StepRequest | None = None
    ) -> Ticket:
        """Takes a worker's gradients; never waits for another worker's.

        Args:
            worker: The worker's index.
            local_step: The step that the gradients were computed for.
            pairs: As `checked_pairs` returns them.
            request: The worker's, for an update that this call does; None from another process.

        Raises:
            ValueError: the gradients are refused.
            CancelledError, WorkerFailedError: the coordinator is closed, or an update has failed.
        """
        raise NotImplementedError

    def wait(self, ticket: Ticket) -> int:
        """Waits for the ticket's token, and returns it."""
        raise NotImplementedError

    def ask(self, ticket: Ticket) -> int | None:
        """Does what `wait` does for a worker of another process, but for the waiting.

        Returns:
            The token; or None if it may still come in time: then ask again.
        """
        raise NotImplementedError

    def give_up(self, ticket: Ticket) -> None:
        """Ends the wait for a ticket whose worker has left; its gradients stay."""
        raise NotImplementedError

    def stop(self) -> None:
        """Closes the coordinator because a signal asks for it."""
        self.was_stopped = True
        self.close()

    def close(self) -> None:
        """Makes all waiting and later calls raise CancelledError.

        Returns once no update is running any more, or after `timeout_s` seconds, with a warning.
        """
        with self._changed:
            self._finish(CancelledError, "the coordinator is closed")
            if not self._changed.wait_for(lambda: not self._updating, self._timeout_s):
                _logger.warning(
                    "the coordinator is closed, and worker %d is still updating the variables "
                    "after %g s",
                    min(self._updating),
                    self._timeout_s,
                )

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _first_token(self) -> int:
        raise NotImplementedError

    def _fail(self, worker: int, doing: str, error: BaseException) -> None:
        """Has nobody go on, as the variables or gradients may be half written."""
        message = f"worker {worker} failed while it {doing}: {say_error(error)}"
        with self._changed:
            self._updating.discard(worker)
            self._finish(WorkerFailedError, message, error)

    def _take_token(self, ticket: Ticket) -> int:
        if ticket.token is not None:
            return ticket.token
        if ticket.refusal is not None:
            ticket.refusal.raise_error()
        self._raise_end()
        raise AssertionError("a wait ends with a token or an error")

    def _is_over(self, ticket: Ticket) -> bool:
        return ticket.is_done or self._end is not None

    def _finish(
        self, error: type[GpuoptError], message: str, cause: BaseException | None = None
    ) -> None:
        if self._end is None:
            self._end = Refusal(error, message, cause)
        self._changed.notify_all()

    def _raise_end(self) -> None:
        if self._end is not None:
            self._end.raise_error()


def failure_of(error: BaseException | None) -> BaseException | None:
    """Returns the error if who was ended by it has failed, and else None.

    Who was told that all is over has not failed, nor who has called `sys.exit()` without a status.
    """
    if isinstance(error, CancelledError):
        return None
    if isinstance(error, SystemExit) and (error.code is None or error.code == 0):
        return None
    return error
