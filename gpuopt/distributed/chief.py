"""The chief of a training in several processes: it serves its coordinator to the workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Set
from time import monotonic

import numpy as np

from gpuopt.distributed.chief_messages import (
    LOOK_S,
    Ask,
    End,
    Leave,
    Push,
    RemoteError,
    Reply,
    SharedVariables,
    Stop,
    refusal_of,
)
from gpuopt.distributed.communicator import MessagingCommunicator
from gpuopt.distributed.coordinator import Coordinator
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.tokens import Ticket
from gpuopt.errors import GpuoptError, WorkerFailedError
from gpuopt.step.pairs import checked_pairs
from gpuopt.step.wide_gradients import GradientTypes

_logger = logging.getLogger("gpuopt")


class Chief:
    """Does on one thread what the workers ask for, in the order in which their messages come.

    A worker waits for its reply, and the chief for nobody: it keeps the workers' tickets, and
    answers when a ticket has its token, or an error.
    """

    def __init__(
        self,
        communicator: MessagingCommunicator,
        coordinator: Coordinator,
        shared: SharedVariables,
        valid_dtypes: Set[np.dtype[np.generic]],
        timeout_s: float,
        stop: StopRequest | None,
    ) -> None:
        """Takes a newly opened coordinator, with a worker for each other rank.

        Workers have `timeout_s` seconds to end when training is over.
        """
        self._communicator = communicator
        self._coordinator = coordinator
        self._shared = shared
        self._valid_dtypes = valid_dtypes
        self._timeout_s = timeout_s
        self._stop = stop
        ranks = [_rank_of(worker) for worker in range(coordinator.total_num_replicas)]
        self._present = set(ranks)  # whose workers have not ended
        # In the order in which their messages are looked for: the last one heard comes last.
        self._heard = ranks
        self._tickets: dict[tuple[int, int], Ticket] = {}  # by worker and number of the push
        self._num_finished = 0  # without a failure
        self._failures: list[tuple[Leave, str]] = []

    def serve(self) -> None:
        """Trains until all workers have ended, or too few are left to go on; see `run`.

        Raises:
            WorkerFailedError: a worker has failed, and the others could not do without it.
            Exception: what the update of the variables raised.
        """
        coordinator = self._coordinator
        total = coordinator.total_num_replicas
        with coordinator:
            first = self._shared.pack(self._shared.variables)
            for worker in range(total):
                self._send(worker, Reply(0, coordinator.join(worker), None, first))
            ends = math.inf
            while self._present and monotonic() < ends:
                self._receive()
                if self._stop is not None and self._stop.has_come:
                    coordinator.stop()
                self._answer()
                too_few = len(self._present) < coordinator.num_workers_needed
                if ends == math.inf and (too_few or coordinator.is_closed):
                    ends = monotonic() + self._timeout_s
        failure = None
        if self._failures:
            _, failure = min(self._failures, key=lambda each: each[0].is_told)
        self._tell_end(failure)
        if failure is not None:
            raise WorkerFailedError(failure)

    def _receive(self) -> None:
        """Takes the next message, if one comes soon."""
        received = self._communicator.receive(self._heard, LOOK_S)
        if received is None:
            return
        rank, message = received
        worker = _worker_of(rank)
        self._heard.remove(rank)
        if isinstance(message, GpuoptError):  # of a process that has ended
            if rank in self._present:
                self._leave(worker, Leave(repr(message), is_told=True))
            return
        self._heard.append(rank)
        if isinstance(message, Push):
            self._push(worker, message)
        elif isinstance(message, Stop):
            self._coordinator.stop()
        elif isinstance(message, Leave):
            self._leave(worker, message)
        elif isinstance(message, Ask):
            self._send(worker, Reply(message.number, 0, None, b""))

    def _push(self, worker: int, message: Push) -> None:
        coordinator = self._coordinator
        was_closed = coordinator.is_closed
        try:
            given = self._shared.unpack_gradients(message.gradients)
            # Workers have refused what the optimizer does not take.
            pairs = checked_pairs(given, self._valid_dtypes, GradientTypes.WIDE)
            ticket = coordinator.push(worker, message.local_step, pairs)
        except Exception as error:
            if coordinator.is_closed and not was_closed:
                raise  # of the update, which is the chief's
            self._send(worker, Reply(message.number, None, refusal_of(error), b""))
        else:
            self._tickets[worker, message.number] = ticket

    def _answer(self) -> None:
        """Replies to the workers whose tickets have a token, or an error."""
        state = b""
        for (worker, number), ticket in list(self._tickets.items()):
            try:
                token = self._coordinator.ask(ticket)
            except GpuoptError as error:
                reply = Reply(number, None, refusal_of(error), b"")
            else:
                if token is None:
                    continue
                state = state or self._shared.pack(self._coordinator.variables)
                reply = Reply(number, token, None, state)
            del self._tickets[worker, number]
            self._send(worker, reply)

    def _leave(self, worker: int, message: Leave) -> None:
        for owner, number in list(self._tickets):
            if owner == worker:
                self._coordinator.give_up(self._tickets.pop((owner, number)))
        error = None if message.error is None else RemoteError(message.error)
        self._coordinator.leave(worker, error)
        self._present.remove(_rank_of(worker))
        if error is None:
            self._num_finished += 1
        elif self._coordinator.can_go_on_with(len(self._present), self._num_finished):
            _logger.warning("worker %d failed: %s", worker, message.error)
        else:
            text = f"worker {worker}, rank {_rank_of(worker)}, has failed: {message.error}"
            self._failures.append((message, text))

    def _tell_end(self, failure: str | None) -> None:
        """Tells all workers that it is over, and waits until those that have ended know it."""
        coordinator, shared = self._coordinator, self._shared
        if self._present:
            late = sorted(map(_worker_of, self._present))
            _logger.warning("workers %s have not ended within %g s", late, self._timeout_s)
        figures, was_stopped = coordinator.figures(), coordinator.was_stopped
        last, step_alone = shared.pack(shared.variables), shared.pack([])
        unaware = []
        for worker in range(coordinator.total_num_replicas):
            rank = _rank_of(worker)
            is_late = rank in self._present  # and so does not wait for this message
            state = step_alone if is_late else last
            self._send(worker, End(figures, failure, was_stopped, state))
            if not is_late and rank in self._heard:
                unaware.append(rank)
        ends = monotonic() + self._timeout_s
        while unaware and monotonic() < ends:
            received = self._communicator.receive(unaware, LOOK_S)
            if received is not None and isinstance(received[1], GpuoptError):
                unaware.remove(received[0])

    def _send(self, worker: int, message: Reply | End) -> None:
        self._communicator.send(message, _rank_of(worker))


def _rank_of(worker: int) -> int:
    return worker + 1


def _worker_of(rank: int) -> int:
    return rank - 1
