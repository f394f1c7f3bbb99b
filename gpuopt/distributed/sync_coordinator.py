"""SyncCoordinator: gathers the workers' gradients; lets workers go on when a step is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from gpuopt.distributed.communicator import Refusal, say_error
from gpuopt.distributed.coordinator import Coordinator
from gpuopt.distributed.gathering import GatheredGradients, Pairs
from gpuopt.distributed.tokens import Ticket, TokenPolicy, TokenQueue
from gpuopt.errors import CancelledError, DeadlineExceededError, WorkerFailedError
from gpuopt.step.request import StepRequest
from gpuopt.variables.variable import Variable


class SyncCoordinator(Coordinator):
    """Owns the variables, their accumulators, the global step and the tokens.

    A worker pushes its gradients of all variables at once, so that none is split between two steps;
    takes a ticket; and waits until the ticket has a token. The worker whose gradients complete a
    step updates the variables, on its own thread, while the others may push and give up in time.

    Gradients are gathered and applied in rounds. A round whose update leaves the global step as it
    was, as one that is skipped for NaN, is followed by another round for the same step. Whatever an
    update does to the global step, the accumulators and the tokens follow it.

    Nobody waits for ever. A ticket ends with a token, or with DeadlineExceededError after
    `timeout_s` seconds, CancelledError after `close`, or WorkerFailedError when no worker is left
    that could still complete the step.
    """

    def __init__(
        self,
        update: Callable[[Pairs], None],
        global_step: Variable,
        *,
        replicas_to_aggregate: int,
        total_num_replicas: int,
        num_tokens: int,
        token_policy: TokenPolicy,
        timeout_s: float,
        belongs_to_run: bool = False,
    ) -> None:
        """Opens the coordinator; `SyncReplicasOptimizer.start` checks the numbers.

        Args:
            update: Applies the aggregated gradients and lets `global_step` grow by 1; or skips
                them, and leaves it as it is. Is given the `request` of `push`, too, if there is
                one.
            global_step: A scalar integer variable.
            replicas_to_aggregate: How many gradients make a step.
            total_num_replicas: How many workers there are.
            num_tokens: How many tokens there are before the first step.
            token_policy: See `SyncReplicasOptimizer.start`.
            timeout_s: How long a worker waits for its token, in seconds.
            belongs_to_run: See `Coordinator`.
        """
        self.replicas_to_aggregate = replicas_to_aggregate
        self.tokens_per_step = max(replicas_to_aggregate, total_num_replicas)
        self._update: Callable[..., None] = update
        self._queue = TokenQueue(token_policy, int(global_step), num_tokens, self.tokens_per_step)
        self._gathered = GatheredGradients()
        super().__init__(
            global_step,
            total_num_replicas=total_num_replicas,
            timeout_s=timeout_s,
            belongs_to_run=belongs_to_run,
        )

    @property
    def variables(self) -> list[Variable]:
        return self._gathered.variables

    @property
    def num_workers_needed(self) -> int:
        aggregate, total = self.replicas_to_aggregate, self.total_num_replicas
        return aggregate if aggregate <= total else 1

    def num_accumulated(self, variable: Variable) -> int:
        """Returns how many gradients of `variable` the next step has so far."""
        return self._gathered.num_accumulated(variable)

    def num_tokens(self) -> int:
        """Returns how many tokens lie ready."""
        with self._changed:
            return self._queue.num_tokens

    def num_waiting(self) -> int:
        """Returns how many calls wait for a token."""
        with self._changed:
            return len(self._queue.waiting)

    def leave(self, worker: int, error: BaseException | None = None) -> None:
        with self._changed:
            super().leave(worker, error)
            self._release_or_refuse()

    def push(
        self, worker: int, local_step: int, pairs: Pairs, request: StepRequest | None = None
    ) -> Ticket:
        """Adds a worker's gradients, and does the update if they complete a step; never waits.

        Args:
            worker: The worker's index.
            local_step: The step that the gradients were computed for; late ones are dropped.
            pairs: As `checked_pairs` returns them. All pushes hold the same variables.
            request: The worker's, for an update that this call does; None from another process.

        Raises:
            ValueError: the variables are not those of the first push, or one changed between array
                and IndexedSlices.
            CancelledError, WorkerFailedError: the coordinator is closed, or an update has failed.
        """
        with self._changed:
            self._raise_end()
            self._threads[worker] = threading.current_thread()
            self._gathered.check(pairs, self._queue.step)
        prepared = self._gathered.prepare(pairs)
        doing = "handed over its gradients"
        try:
            with self._changed:
                self._raise_end()
                ticket = self._accept(worker, local_step, prepared)
                aggregated = self._begin_update(worker)
                if aggregated is None:
                    self._release_or_refuse()
            doing = "updated the variables"
            while aggregated is not None:
                # Without the lock, so that the others' time limits hold meanwhile.
                self._update(aggregated, *([] if request is None else [request]))
                aggregated = self._end_update(worker)
        except BaseException as error:
            self._fail(worker, doing, error)
            raise
        return ticket

    def wait(self, ticket: Ticket) -> int:
        """Waits for the ticket's token, and returns it.

        Raises:
            DeadlineExceededError: the token did not come in time; the message says which workers
                are missing.
            CancelledError: the coordinator was closed, or all other workers have finished.
            WorkerFailedError: a worker has failed, and no step can be completed without it.
        """
        with self._changed:
            if not self._is_over(ticket):
                started = monotonic()
                try:
                    in_time = self._changed.wait_for(lambda: self._is_over(ticket), self._timeout_s)
                finally:
                    self._end_wait(ticket, monotonic() - started)
                if not in_time:
                    raise DeadlineExceededError(self._say_who_is_missing(ticket))
            return self._take_token(ticket)

    def ask(self, ticket: Ticket) -> int | None:
        with self._changed:
            is_over, waited_s = self._is_over(ticket), monotonic() - ticket.began
            if not is_over and waited_s < self._timeout_s:
                return None
            self._end_wait(ticket, waited_s)
            if not is_over:
                raise DeadlineExceededError(self._say_who_is_missing(ticket))
            return self._take_token(ticket)

    def give_up(self, ticket: Ticket) -> None:
        with self._changed:
            self._end_wait(ticket, monotonic() - ticket.began)

    def _first_token(self) -> int:
        return self._queue.step

    def _end_wait(self, ticket: Ticket, waited_s: float) -> None:
        self._figures[ticket.worker].waited_s += waited_s
        if not ticket.is_done:
            self._queue.waiting.remove(ticket)

    def _accept(self, worker: int, local_step: int, prepared: list[tuple[Any, Any]]) -> Ticket:
        """Adds gradients, or drops them if they are late; returns a place in the queue."""
        accepted = self._gathered.accept(prepared, local_step)
        if accepted:
            self._figures[worker].accepted += 1
        else:
            self._figures[worker].stale += 1
        gathering = self._queue.num_rounds + bool(self._updating)
        ticket = Ticket(worker, gathering if accepted else gathering - 1)
        self._queue.waiting.append(ticket)
        return ticket

    def _begin_update(self, worker: int) -> Pairs | None:
        """Takes all gradients if they make a step and no update is running; else returns None."""
        if self._updating or not self._gathered.has(self.replicas_to_aggregate):
            return None
        self._updating.add(worker)
        return self._gathered.take()

    def _end_update(self, worker: int) -> Pairs | None:
        """Lets workers go on; returns the next step's gradients if all are there by now."""
        with self._changed:
            self._updating.discard(worker)
            # A take lets the accumulators' step grow by 1; an update need not do so.
            step = int(self.global_step)
            self._gathered.drop_before(step)
            self._queue.end_round(step)
            aggregated = None if self.is_closed else self._begin_update(worker)
            self._release_or_refuse()
            self._changed.notify_all()
            return aggregated

    def _release_or_refuse(self) -> None:
        """Gives tokens to waiting workers; ends all waits with an error if no token can come."""
        is_changed = self._queue.give_tokens()
        if not is_changed and self._is_stuck():
            self._queue.refuse_all(self._explain_stop())
            is_changed = True
        if is_changed:
            self._changed.notify_all()

    def _is_stuck(self) -> bool:
        """Whether all workers that have not left wait, and no running update could release them."""
        if not self._queue.waiting or self._updating or self.is_closed:
            return False
        waiting = {ticket.worker for ticket in self._queue.waiting}
        return len(waiting | self._left.keys()) == self.total_num_replicas

    def _explain_stop(self) -> Refusal:
        state = f"{self._describe_step()}, and every other worker waits"
        for worker, error in self._left.items():
            if error is not None:
                text = f"worker {worker} has failed: {say_error(error)}; {state}"
                return Refusal(WorkerFailedError, text, error)
        if self._left:
            return Refusal(CancelledError, f"workers {_join(self._left)} have finished; {state}")
        return Refusal(WorkerFailedError, f"no worker can go on: {state}")

    def _say_who_is_missing(self, ticket: Ticket) -> str:
        waited = f"worker {ticket.worker} waited {self._timeout_s:g} s for its token"
        if self._updating:
            return f"{waited}: worker {min(self._updating)} is still updating the variables"
        waiting = {other.worker for other in self._queue.waiting} | {ticket.worker}
        missing = []
        for worker in range(self.total_num_replicas):
            if worker in waiting:
                continue
            thread = self._threads.get(worker)
            if worker in self._left:
                missing.append(f"worker {worker} has left")
            elif thread is None:
                missing.append(f"worker {worker} has never come")
            elif not thread.is_alive():
                missing.append(f"worker {worker}'s thread has ended")
            else:
                missing.append(f"worker {worker} has not pushed again")
        return f"{waited}: {self._describe_step()}; {', '.join(missing)}"

    def _describe_step(self) -> str:
        number, required = self._gathered.num_complete(), self.replicas_to_aggregate
        return f"step {self._queue.step} has {number} of {required} gradients"


def _join(workers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
