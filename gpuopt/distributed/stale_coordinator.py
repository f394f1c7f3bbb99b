"""StaleGradientCoordinator: applies each worker's gradients as they come, or drops them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from gpuopt.distributed.coordinator import Coordinator
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.tokens import Ticket
from gpuopt.step.request import StepRequest
from gpuopt.variables.identity import Identity
from gpuopt.variables.variable import Variable


class StaleGradientCoordinator(Coordinator):
    """Lets workers train without waiting for each other.

    Each push is a step of its own, or is dropped. Its ticket has a token at once: the newest step.
    """

    def __init__(
        self,
        update: Callable[[Pairs, int, StepRequest | None], bool],
        global_step: Variable,
        counters: Sequence[Variable],
        *,
        total_num_replicas: int,
        timeout_s: float,
    ) -> None:
        """Opens the coordinator; an optimizer's `run` closes it.

        Args:
            update: Is given gradients, the step that they were computed at, and the request of
                `push`; applies them, or drops them and returns False. Pushes of several threads
                call it at a time.
            global_step: A scalar integer variable.
            counters: Variables that change with pushes and are not trained.
            total_num_replicas: How many workers there are.
            timeout_s: How long `close` waits for updates, in seconds.
        """
        self._update = update
        self._counters = list(counters)
        self._trained: dict[Identity, Variable] = {}
        super().__init__(
            global_step,
            total_num_replicas=total_num_replicas,
            timeout_s=timeout_s,
            belongs_to_run=True,
        )

    @property
    def variables(self) -> list[Variable]:
        return [*self._trained.copy().values(), *self._counters]

    @property
    def num_workers_needed(self) -> int:
        return 1

    def can_go_on_with(self, num_present: int, num_finished: int) -> bool:
        # Not the number of those present alone: who is the last one would be a matter of time.
        return num_present + num_finished > 0

    def push(
        self, worker: int, local_step: int, pairs: Pairs, request: StepRequest | None = None
    ) -> Ticket:
        """Does the step of these gradients, or drops them; waits for steps of other threads alone.

        Args:
            worker: The worker's index.
            local_step: The global step at which the gradients were computed.
            pairs: As `checked_pairs` returns them.
            request: The worker's; None from another process.

        Raises:
            CancelledError, WorkerFailedError: the coordinator is closed, or an update has failed.
            Exception: this update has failed.
        """
        with self._changed:
            self._raise_end()
            self._threads[worker] = threading.current_thread()
            for gradient, variable in pairs:
                if gradient is not None:
                    self._trained[variable.identity] = variable
            self._updating.add(worker)
        try:
            is_accepted = self._update(pairs, local_step, request)
            ticket = Ticket(worker, last_round=0)
            ticket.token = int(self.global_step)
            with self._changed:
                self._updating.discard(worker)
                figures = self._figures[worker]
                figures.accepted += is_accepted
                figures.stale += not is_accepted
                self._changed.notify_all()
        except BaseException as error:
            self._fail(worker, "updated the variables", error)
            raise
        return ticket

    def wait(self, ticket: Ticket) -> int:
        return self._take_token(ticket)

    def ask(self, ticket: Ticket) -> int:
        return self._take_token(ticket)

    def give_up(self, ticket: Ticket) -> None:
        pass  # nothing waits for a token

    def _first_token(self) -> int:
        return int(self.global_step)
