"""RemoteCoordinator: a worker's end of a coordinator that is in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from gpuopt.distributed.chief_messages import (
    CHIEF,
    LOOK_S,
    Ask,
    End,
    Leave,
    Push,
    Reply,
    SharedVariables,
    Stop,
)
from gpuopt.distributed.communicator import MessagingCommunicator, say_error
from gpuopt.distributed.coordinator import Coordinator, WorkerFigures, failure_of
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.tokens import Ticket
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError
from gpuopt.step.request import StepRequest
from gpuopt.variables.variable import Variable

# The chief says who is missing when the time limit is over; it is waited for longer than that.
_PATIENCE = 2


class RemoteCoordinator(Coordinator):
    """Does what the chief's coordinator does, for the one worker of this process.

    The variables of this process follow the chief's: they are assigned whenever the chief answers.
    Accumulators and tokens are the chief's alone. Only the thread that made it may use it.
    """

    def __init__(
        self,
        communicator: MessagingCommunicator,
        shared: SharedVariables,
        stop: StopRequest | None,
        owner: str,
        global_step: Variable,
        *,
        total_num_replicas: int,
        timeout_s: float,
    ) -> None:
        """Takes the chief's first message for granted; the optimizer is of class `owner`."""
        self._shared = shared
        super().__init__(
            global_step,
            total_num_replicas=total_num_replicas,
            timeout_s=timeout_s,
            belongs_to_run=True,
        )
        self._communicator = communicator
        self._owner = owner
        self._stop = stop
        self._has_told_stop = False
        self._thread = threading.get_ident()
        self._patience_s = _PATIENCE * timeout_s
        self._num_messages = 0
        self._last: End | None = None
        # By the number of the message that is to be answered; 0 is for the first token.
        self._tickets: dict[int, Ticket] = {}

    @property
    def variables(self) -> list[Variable]:
        """All that follow the chief's."""
        return self._shared.variables

    def figures(self) -> list[WorkerFigures]:
        """Returns what each worker has done, by its index; known when the training is over."""
        return super().figures() if self._last is None else list(self._last.figures)

    def join(self, worker: int) -> int:
        """Gets the chief's variables; returns the step that the first gradient is for."""
        self._tickets[0] = first = Ticket(worker, last_round=0)
        return self.wait(first)

    def leave(self, worker: int, error: BaseException | None = None) -> None:
        """Tells the chief that the worker has ended, with the error that ended it, if any."""
        if self._end is not None:
            return
        failure = failure_of(error)
        text = None if failure is None else say_error(failure)
        self._communicator.send(Leave(text, isinstance(failure, GpuoptError)), CHIEF)

    def push(
        self, worker: int, local_step: int, pairs: Pairs, request: StepRequest | None = None
    ) -> Ticket:
        """Sends gradients to the chief; see `Coordinator.push`. `wait` raises what it refuses."""
        with self._changed:
            self._raise_end()
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"worker {worker} must apply its gradients on the thread that its function was "
                "called on"
            )
        if request is not None and request.additions:
            raise RuntimeError(
                f"{type(request.additions[0]).__name__} adds to steps of the optimizer inside, "
                f"and the chief makes those: wrap the optimizer that is inside of {self._owner}"
            )
        gradients = self._shared.pack_gradients(pairs)
        return self._request(worker, Push(self._next_number(), local_step, gradients))

    def wait(self, ticket: Ticket) -> int:
        """Waits for the chief's reply; see `Coordinator.wait`.

        Raises:
            ValueError, TypeError: the chief has refused the gradients.
            DeadlineExceededError: the token did not come in time; or the chief has not answered
                within twice that time.
            CancelledError: the training is over.
            WorkerFailedError: a worker has failed, and no step can be completed without it; or the
                chief has failed.
        """
        self._wait_for_reply(ticket)
        return self._take_token(ticket)

    def wait_for_end(self, worker: int) -> End:
        """Waits until the training is over, for as long as others train and the chief answers.

        Raises:
            DeadlineExceededError: the chief does not answer.
            WorkerFailedError: the chief has failed.
        """
        while self._end is None:
            self._wait_for_reply(self._request(worker, Ask(self._next_number())))
            self._receive_until(lambda: self._end is not None, self._timeout_s)
        if self._last is None:
            self._raise_end()
        assert self._last is not None
        return self._last

    def _next_number(self) -> int:
        self._num_messages += 1
        return self._num_messages

    def _request(self, worker: int, message: Push | Ask) -> Ticket:
        self._communicator.send(message, CHIEF)
        self._tickets[message.number] = ticket = Ticket(worker, last_round=0)
        return ticket

    def _wait_for_reply(self, ticket: Ticket) -> None:
        if not self._receive_until(lambda: self._is_over(ticket), self._patience_s):
            raise DeadlineExceededError(
                f"worker {ticket.worker}: the chief, rank {CHIEF}, has not answered within "
                f"{self._patience_s:g} s"
            )

    def _receive_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Returns whether `is_done()` holds in the end."""
        ends = monotonic() + timeout_s
        while not is_done():
            if monotonic() >= ends:
                return False
            self._receive()
        return True

    def _receive(self) -> None:
        """Does what the chief says, if it says something soon."""
        received = self._communicator.receive([CHIEF], LOOK_S)
        if self._stop is not None and self._stop.has_come and not self._has_told_stop:
            self._has_told_stop = True
            self._communicator.send(Stop(), CHIEF)
        if received is None:
            return
        message = received[1]
        if isinstance(message, Reply):
            ticket = self._tickets.pop(message.number)
            if message.state:
                self._shared.unpack(message.state)
            ticket.token, ticket.refusal = message.token, message.refusal
            return
        finish = partial(self._finish, CancelledError, "the training is over")
        if isinstance(message, End):
            self._shared.unpack(message.state)
            self._last, self.was_stopped = message, message.was_stopped
        else:
            finish = partial(self._finish, type(message), str(message))
        with self._changed:
            finish()
