"""RemoteCoordinator: a worker's end of a coordinator that is in another process."""

from __future__ import annotations

import threading
from functools import partial
from time import monotonic
from typing import Any

from gpuopt.distributed.communicator import MessagingCommunicator
from gpuopt.distributed.coordinator import Coordinator, WorkerFigures
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.sync_messages import (
    CHIEF,
    LOOK_S,
    End,
    Leave,
    Push,
    Reply,
    SharedVariables,
    Stop,
)
from gpuopt.distributed.tokens import Ticket
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError
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
        update: Any,
        global_step: Variable,
        *,
        timeout_s: float,
        **settings: Any,
    ) -> None:
        """Takes the chief's first message for granted.

        Args:
            communicator: This worker's end of the group.
            shared: The variables of the training.
            stop: Ends the training when a signal comes.
            update: Ignored: the chief updates.
            global_step: See `Coordinator`.
            timeout_s: How long a worker waits for its token, in seconds.
            **settings: See `Coordinator`.
        """
        super().__init__(update, global_step, timeout_s=timeout_s, **settings)
        self._communicator = communicator
        self._shared = shared
        self._stop = stop
        self._has_told_stop = False
        self._thread = threading.get_ident()
        self._patience_s = _PATIENCE * timeout_s
        self._num_pushes = 0
        self._last: End | None = None
        # By the number of the push; 0 is for the first token.
        self._tickets: dict[int, Ticket] = {}

    def figures(self) -> list[WorkerFigures]:
        """Returns what each worker has done, by its index; known when the training is over."""
        return super().figures() if self._last is None else list(self._last.figures)

    def join(self, worker: int) -> int:
        """Gets the chief's variables; returns the step that the first gradient is for."""
        return self.wait(self._new_ticket(worker, 0))

    def leave(self, worker: int, error: BaseException | None = None) -> None:
        """Tells the chief that the worker has ended, with the error that ended it, if any."""
        if self._end is not None:
            return
        text = None if error is None else repr(error)
        has_failed = not isinstance(error, CancelledError | None)
        message = Leave(text, has_failed, isinstance(error, GpuoptError))
        self._communicator.send(message, CHIEF)

    def push(self, worker: int, local_step: int, pairs: Pairs) -> Ticket:
        """Sends gradients to the chief; see `Coordinator.push`. `wait` raises what it refuses."""
        with self._changed:
            self._raise_end()
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                f"worker {worker} must apply its gradients on the thread that its function was "
                "called on"
            )
        gradients = self._shared.pack_gradients(pairs)
        self._num_pushes += 1
        self._communicator.send(Push(self._num_pushes, local_step, gradients), CHIEF)
        return self._new_ticket(worker, self._num_pushes)

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
        ends = monotonic() + self._patience_s
        while not self._is_over(ticket):
            if monotonic() >= ends:
                raise DeadlineExceededError(
                    f"worker {ticket.worker}: the chief, rank {CHIEF}, has not answered within "
                    f"{self._patience_s:g} s"
                )
            self._receive()
        return self._take_token(ticket)

    def wait_for_end(self) -> End:
        """Waits until the training is over, without a time limit: others may train on.

        Raises:
            WorkerFailedError: the chief has failed.
        """
        while self._last is None:
            if self._end is not None:
                self._raise_end()
            self._receive()
        return self._last

    def _new_ticket(self, worker: int, number: int) -> Ticket:
        self._tickets[number] = ticket = Ticket(worker, last_round=0)
        return ticket

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
            if message.error is None:
                self._shared.unpack(message.state)
            ticket.token, ticket.error = message.token, message.error
            return
        finish = partial(self._finish, CancelledError, "the training is over")
        if isinstance(message, End):
            self._shared.unpack(message.state)
            self._last, self.was_stopped = message, message.was_stopped
        else:
            finish = partial(self._finish, type(message), str(message))
        with self._changed:
            finish()
