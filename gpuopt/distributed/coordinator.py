"""Coordinator: who gathers the workers' gradients, updates the variables and lets workers go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal, TypeAlias

from gpuopt.distributed.accumulators import ConditionalAccumulator, SparseConditionalAccumulator
from gpuopt.distributed.waiting import checked_timeout
from gpuopt.errors import CancelledError, DeadlineExceededError, GpuoptError, WorkerFailedError
from gpuopt.gradients import Gradient
from gpuopt.identity import Identity
from gpuopt.indexed_slices import IndexedSlices
from gpuopt.variable import Variable

TokenPolicy = Literal["tf", "per_step"]
Pairs: TypeAlias = "list[tuple[Gradient | None, Variable]]"
Accumulator = ConditionalAccumulator | SparseConditionalAccumulator


@dataclass
class WorkerFigures:
    """What one worker has done so far.

    Attributes:
        accepted: How many of its gradients went into a step.
        stale: How many came too late and were dropped.
        waited_s: How long it has waited for its tokens, in seconds.
    """

    accepted: int = 0
    stale: int = 0
    waited_s: float = 0.0


class Ticket:
    """A worker's place in the queue for a token.

    Attributes:
        worker: Whose it is.
        local_step: The step that the worker's last gradient was computed for.
        token: The step to compute the next gradient for, once the worker may go on.
        error: What the worker has to raise instead.
    """

    __slots__ = ("error", "local_step", "token", "worker")

    def __init__(self, worker: int, local_step: int) -> None:
        self.worker = worker
        self.local_step = local_step
        self.token: int | None = None
        self.error: GpuoptError | None = None

    @property
    def is_done(self) -> bool:
        return self.token is not None or self.error is not None


class Coordinator:
    """Owns the variables, their accumulators, the global step and the tokens.

    A worker pushes its gradients of all variables at once, so that none is split between two steps;
    takes a ticket; and waits until the ticket has a token. The worker whose gradients complete a
    step updates the variables, on its own thread, while the others may push and give up in time.

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
    ) -> None:
        """Opens the coordinator; `SyncReplicasOptimizer.start` checks the numbers.

        Args:
            update: Applies the aggregated gradients and lets `global_step` grow by 1.
            global_step: A scalar integer variable.
            replicas_to_aggregate: How many gradients make a step.
            total_num_replicas: How many workers there are.
            num_tokens: How many tokens there are before the first step.
            token_policy: See `SyncReplicasOptimizer.start`.
            timeout_s: How long a worker waits for its token, in seconds.
        """
        self.global_step = global_step
        self.replicas_to_aggregate = replicas_to_aggregate
        self.total_num_replicas = total_num_replicas
        self.tokens_per_step = max(replicas_to_aggregate, total_num_replicas)
        self._update = update
        self._is_per_step = token_policy == "per_step"
        self._timeout_s = checked_timeout(timeout_s)
        self._changed = threading.Condition(threading.Lock())
        self._step = int(global_step)
        self._accumulators: dict[Identity, tuple[Variable, Accumulator]] = {}
        self._without_gradient: dict[Identity, Variable] = {}
        self._tokens = deque([self._step] * num_tokens)
        self._tickets: deque[Ticket] = deque()
        self._figures = [WorkerFigures() for _ in range(total_num_replicas)]
        self._threads: dict[int, threading.Thread] = {}
        self._left: dict[int, BaseException | None] = {}
        self._updating_worker: int | None = None
        self._end: tuple[type[GpuoptError], str, BaseException | None] | None = None

    @property
    def variables(self) -> list[Variable]:
        """What is trained: known once the first gradients were pushed."""
        return [variable for variable, _ in self._accumulators.values()]

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or an update has failed."""
        return self._end is not None

    @property
    def num_workers_needed(self) -> int:
        """How many workers must be there to complete steps."""
        aggregate, total = self.replicas_to_aggregate, self.total_num_replicas
        return aggregate if aggregate <= total else 1

    def num_accumulated(self, variable: Variable) -> int:
        """Returns how many gradients of `variable` the next step has so far."""
        found = self._accumulators.get(variable.identity)
        return 0 if found is None else found[1].num_accumulated()

    def num_tokens(self) -> int:
        """Returns how many tokens lie ready."""
        with self._changed:
            return len(self._tokens)

    def num_waiting(self) -> int:
        """Returns how many calls wait for a token."""
        with self._changed:
            return len(self._tickets)

    def figures(self) -> list[WorkerFigures]:
        """Returns what each worker has done so far, by its index."""
        with self._changed:
            return [replace(figures) for figures in self._figures]

    def join(self, worker: int) -> int:
        """Counts a worker in; returns the step to compute its first gradient for.

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
            return self._step

    def leave(self, worker: int, error: BaseException | None = None) -> None:
        """Counts a worker out, with the error that ended it, if any."""
        with self._changed:
            self._left[worker] = error
            self._release_or_refuse()

    def push(self, worker: int, local_step: int, pairs: Pairs) -> Ticket:
        """Hands over gradients, and does the update if they complete a step; waits for nobody.

        Args:
            worker: Whose they are.
            local_step: The step they were computed for; they are dropped if it is over.
            pairs: As `checked_pairs` returns them. All pushes hold the same variables.

        Raises:
            ValueError: the variables are not those of the first push, or one changed between array
                and IndexedSlices.
            CancelledError, WorkerFailedError: the coordinator is closed, or an update has failed.
        """
        ticket = Ticket(worker, local_step)
        with self._changed:
            self._raise_end()
            self._threads[worker] = threading.current_thread()
            if not self._accumulators:
                self._make_accumulators(pairs)
            self._check_variables(pairs)
        prepared = self._prepared(pairs)
        with self._changed:
            self._raise_end()
            # All or none: every accumulator is at the same step.
            accepted = all(accumulator.accept(grad, local_step) for accumulator, grad in prepared)
            if accepted:
                self._figures[worker].accepted += 1
            else:
                self._figures[worker].stale += 1
            self._tickets.append(ticket)
            if not self._is_step_complete():
                self._release_or_refuse()
                return ticket
            self._updating_worker = worker
            # All variables are taken together: no gradient can be split between two steps.
            aggregated: Pairs = [(a.take(), v) for v, a in self._accumulators.values()]
            aggregated += [(None, variable) for variable in self._without_gradient.values()]
        self._finish_step(worker, aggregated)
        return ticket

    def wait(self, ticket: Ticket) -> int:
        """Waits for the ticket's token, and returns it.

        Raises:
            DeadlineExceededError: it did not come in time; the message says who is missing.
            CancelledError: the coordinator was closed, or all other workers have finished.
            WorkerFailedError: without a worker that failed, no step can be completed.
        """
        with self._changed:
            if not ticket.is_done and self._end is None:
                started = monotonic()
                try:
                    in_time = self._changed.wait_for(
                        lambda: ticket.is_done or self._end is not None, self._timeout_s
                    )
                finally:
                    self._figures[ticket.worker].waited_s += monotonic() - started
                    if not ticket.is_done:
                        self._tickets.remove(ticket)
                if not in_time:
                    raise DeadlineExceededError(self._who_is_missing(ticket))
            if ticket.token is not None:
                return ticket.token
            if ticket.error is not None:
                raise ticket.error
            self._raise_end()
            raise AssertionError("a wait ends with a token or an error")

    def close(self) -> None:
        """Releases everyone: waits, now and later, end with CancelledError.

        Returns once no update is going on any more, or after `timeout_s` seconds.
        """
        with self._changed:
            self._finish(CancelledError, "the coordinator is closed")
            self._changed.wait_for(lambda: self._updating_worker is None, self._timeout_s)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepared(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        """Merges repeated rows, outside the lock: workers do this at the same time."""
        prepared = []
        for gradient, variable in pairs:
            if gradient is None:
                continue
            _, accumulator = self._accumulators[variable.identity]
            if isinstance(accumulator, SparseConditionalAccumulator):
                gradient = accumulator.merged(gradient.values, gradient.indices)
            prepared.append((accumulator, gradient))
        return prepared

    def _make_accumulators(self, pairs: Pairs) -> None:
        for gradient, variable in pairs:
            if gradient is None:
                self._without_gradient[variable.identity] = variable
                continue
            sparse = isinstance(gradient, IndexedSlices)
            make = SparseConditionalAccumulator if sparse else ConditionalAccumulator
            accumulator = make(
                variable.dtype,
                variable.shape,
                device=variable.device,
                name=f"{variable.name}/grad_accum",
            )
            accumulator.set_global_step(self._step)
            self._accumulators[variable.identity] = variable, accumulator

    def _check_variables(self, pairs: Pairs) -> None:
        given = {variable.identity for gradient, variable in pairs if gradient is not None}
        if given != self._accumulators.keys():
            expected = sorted(identity.name for identity in self._accumulators)
            raise ValueError(
                "each push must hold gradients for the same variables: the first had them for "
                f"{expected}, this one has them for {sorted(identity.name for identity in given)}"
            )
        for gradient, variable in pairs:
            if gradient is None:
                continue
            _, accumulator = self._accumulators[variable.identity]
            was_sparse = isinstance(accumulator, SparseConditionalAccumulator)
            if isinstance(gradient, IndexedSlices) != was_sparse:
                kinds = ("an array", "IndexedSlices")
                raise ValueError(
                    f'the gradient for "{variable.name}" is {kinds[not was_sparse]}; the first one '
                    f"was {kinds[was_sparse]}"
                )

    def _is_step_complete(self) -> bool:
        return self._updating_worker is None and all(
            accumulator.has(self.replicas_to_aggregate)
            for _, accumulator in self._accumulators.values()
        )

    def _finish_step(self, worker: int, aggregated: Pairs) -> None:
        """Updates without the lock, so that the others' time limits hold meanwhile."""
        try:
            self._update(aggregated)
        except BaseException as error:
            message = f"worker {worker} failed while it updated the variables: {error!r}"
            with self._changed:
                self._updating_worker = None
                self._finish(WorkerFailedError, message, error)
            raise
        with self._changed:
            self._updating_worker = None
            self._step = int(self.global_step)
            if not self._is_per_step:
                self._tokens.extend([self._step] * self.tokens_per_step)
            self._release_or_refuse()
            self._changed.notify_all()

    def _release_or_refuse(self) -> None:
        """Gives tokens to whom they belong; ends the wait of all when none could ever come."""
        done = [ticket for ticket in self._tickets if self._may_go_on(ticket)]
        if not done and self._is_stuck():
            for ticket in self._tickets:
                ticket.error = self._stuck_error()
            done = list(self._tickets)
        if done:
            self._tickets = deque(ticket for ticket in self._tickets if not ticket.is_done)
            self._changed.notify_all()

    def _may_go_on(self, ticket: Ticket) -> bool:
        if self._is_per_step:
            if self._step > ticket.local_step:
                ticket.token = self._step
        elif self._tokens:
            ticket.token = self._tokens.popleft()
        return ticket.token is not None

    def _is_stuck(self) -> bool:
        """Whether every worker that has not left waits, and nothing goes on that could end it."""
        if not self._tickets or self._updating_worker is not None:
            return False
        waiting = {ticket.worker for ticket in self._tickets}
        return len(waiting | self._left.keys()) == self.total_num_replicas

    def _stuck_error(self) -> GpuoptError:
        state = f"step {self._step} has {self._accumulated()}, and every other worker waits"
        for worker, error in self._left.items():
            if error is not None:
                failed = WorkerFailedError(f"worker {worker} has failed: {error!r}; {state}")
                failed.__cause__ = error
                return failed
        if self._left:
            return CancelledError(f"workers {_listed(self._left)} have finished; {state}")
        return WorkerFailedError(f"no worker can go on: {state}")

    def _who_is_missing(self, ticket: Ticket) -> str:
        waited = f"worker {ticket.worker} waited {self._timeout_s:g} s for its token"
        if self._updating_worker is not None:
            return f"{waited}: worker {self._updating_worker} is still updating the variables"
        waiting = {other.worker for other in self._tickets} | {ticket.worker}
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
        return f"{waited}: step {self._step} has {self._accumulated()}; {', '.join(missing)}"

    def _accumulated(self) -> str:
        counts = [a.num_accumulated() for _, a in self._accumulators.values()]
        return f"{min(counts, default=0)} of {self.replicas_to_aggregate} gradients"

    def _finish(
        self, error: type[GpuoptError], message: str, cause: BaseException | None = None
    ) -> None:
        if self._end is None:
            self._end = error, message, cause
        self._changed.notify_all()

    def _raise_end(self) -> None:
        if self._end is not None:
            error, message, cause = self._end
            raise error(message) from cause


def _listed(workers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
