"""SyncReplicasOptimizer: several workers' gradients make one update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gpuopt.distributed.communicator import RankGroup
from gpuopt.distributed.coordinator import Coordinator
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.sync_coordinator import SyncCoordinator
from gpuopt.distributed.tokens import TokenPolicy
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S
from gpuopt.distributed.workers_optimizer import (
    Worker,
    WorkersOptimizer,
    check_counter,
    raise_refusal,
)
from gpuopt.optimizer import Optimizer
from gpuopt.step.replica_context import replica_context
from gpuopt.step.request import StepRequest, make_step, pass_on
from gpuopt.training import ExponentialMovingAverage
from gpuopt.variables.gate import writing
from gpuopt.variables.variable import Variable


class SyncReplicasOptimizer(WorkersOptimizer):
    """Aggregates the gradients of several workers before each update (Chen et al. 2016).

    Of `total_num_replicas` workers, the first `replicas_to_aggregate` gradients for a step make
    it: their mean is applied by `opt`, `global_step` grows by 1, and gradients that come later for
    that step are dropped. The other workers are backups against stragglers. With
    `replicas_to_aggregate` above `total_num_replicas`, workers contribute several gradients each.

        sync = SyncReplicasOptimizer(opt, replicas_to_aggregate=2, total_num_replicas=3)
        sync.run(train, global_step)  # train(worker) runs in three threads

    If `opt` skips a step, as for NaN, its gradients are dropped, and others are gathered for the
    same step.

    A row of IndexedSlices is averaged over the gradients that touch it; see
    `SparseConditionalAccumulator`.
    """

    def __init__(
        self,
        opt: Optimizer,
        replicas_to_aggregate: int,
        total_num_replicas: int | None = None,
        variable_averages: ExponentialMovingAverage | None = None,
        variables_to_average: Sequence[Any] | None = None,
        use_locking: bool = False,
        name: str = "sync_replicas",
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Applies the aggregated gradients; its state is this optimizer's.
            replicas_to_aggregate: How many gradients make a step.
            total_num_replicas: How many workers there are; as many as are aggregated, if not given.
            variable_averages: Moving averages that follow every update.
            variables_to_average: The variables of these averages; by default all trainable ones.
            use_locking: As in TensorFlow; without effect, because updates here take turns anyway.
            name: This optimizer's name.

        Raises:
            TypeError: `opt` is no optimizer.
            ValueError: a number is less than 1, or `opt` is for workers itself.
        """
        super().__init__(opt, use_locking, name)
        self.replicas_to_aggregate = _check_at_least_1(
            replicas_to_aggregate, "replicas_to_aggregate"
        )
        self.total_num_replicas = (
            self.replicas_to_aggregate
            if total_num_replicas is None
            else _check_at_least_1(total_num_replicas, "total_num_replicas")
        )
        self._variable_averages = variable_averages
        self._variables_to_average = variables_to_average

    def start(
        self,
        global_step: Any,
        num_tokens: int = -1,
        *,
        token_policy: TokenPolicy = "tf",
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SyncCoordinator:
        """Opens a coordinator for this optimizer's workers; close it in the end.

        Args:
            global_step: A scalar integer variable, from which training goes on.
            num_tokens: How many workers may go on before the first step is complete; -1 stands for
                `replicas_to_aggregate`. Gradients that they compute then are dropped, for they are
                a step behind; 0 wastes none.
            token_policy: "tf": each step puts `max(replicas_to_aggregate, total_num_replicas)`
                tokens into a queue, and each gradient, late ones too, takes the oldest: so a
                worker may be given a step that is already over. "per_step": a worker goes on when
                the step it contributed to is complete, and computes for the newest.
            timeout_s: How long a worker waits for its token, in seconds.

        Raises:
            ValueError: too few tokens to finish the first step; or "per_step" with
                `num_tokens` or with more gradients to aggregate than workers.
            RuntimeError: the coordinator started before is still open.
        """
        step, num_tokens = self._check_start(global_step, num_tokens, token_policy)
        self._close_last()
        if self._variable_averages is not None:
            self._variable_averages.track(self._variables_to_average)
        self._coordinator = coordinator = SyncCoordinator(
            partial(self._update, step),
            step,
            replicas_to_aggregate=self.replicas_to_aggregate,
            total_num_replicas=self.total_num_replicas,
            num_tokens=num_tokens,
            token_policy=token_policy,
            timeout_s=timeout_s,
            belongs_to_run=self._running.is_this_threads,
        )
        return coordinator

    def _check_start(
        self, global_step: Any, num_tokens: int, token_policy: TokenPolicy
    ) -> tuple[Variable, int]:
        """Returns the global step's variable, and how many tokens there are in the beginning."""
        aggregate, total = self.replicas_to_aggregate, self.total_num_replicas
        if token_policy == "per_step":
            if aggregate > total:
                raise ValueError(
                    'token_policy "per_step" needs a worker for each gradient of a step: '
                    f"{aggregate} are to be aggregated from {total} workers"
                )
            if num_tokens > 0:
                raise ValueError(
                    f'token_policy "per_step" has no initial tokens, got num_tokens {num_tokens}'
                )
            num_tokens = 0
        elif token_policy != "tf":
            raise ValueError(f'token_policy must be "tf" or "per_step", got {token_policy!r}')
        if num_tokens < -1:
            raise ValueError(f"num_tokens must be at least -1, got {num_tokens}")
        if num_tokens == -1:
            num_tokens = aggregate
        if num_tokens < aggregate - total:
            raise ValueError(
                f"Too few tokens to finish the first step: {num_tokens} (given) vs "
                f"{aggregate - total} (needed)"
            )
        return check_counter(global_step, "tell late gradients"), num_tokens

    def worker(self, index: int) -> SyncReplicasWorker:
        """Returns the handle of worker `index`, to be used in a `with` statement.

        Raises:
            ValueError: there is no such worker, or `start` was not called.
        """
        if not 0 <= index < self.total_num_replicas:
            raise ValueError(f"worker must be from 0 to {self.total_num_replicas - 1}, got {index}")
        if self._coordinator is None:
            raise ValueError(f'"{self._name}": start() must be called before there are workers')
        return SyncReplicasWorker(self, self._coordinator, index)

    def run(
        self,
        train: Callable[[SyncReplicasWorker], Any],
        global_step: Any,
        num_tokens: int = -1,
        *,
        token_policy: TokenPolicy = "tf",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: RankGroup | None = None,
        stop: StopRequest | None = None,
    ) -> Coordinator:
        """Runs `train(worker)` for every worker, each in its own thread, or its own process.

        When a worker returns or fails, the others go on as long as they can complete steps without
        it; the failure is logged. After that, the threads have `timeout_s` seconds to end.

        With a group, as `MPIGroup()`, all of its processes call this. Rank 0 is the chief: it calls
        `train` for nobody, and has the optimizer's state, the accumulators and the tokens. Rank
        `i + 1` is worker `i`. Variables are those that are trainable when `run` begins, the same by
        name on all ranks. They and `global_step` begin with the chief's values; a worker gets them
        anew whenever it may go on, and all ranks have the chief's in the end.

        Args:
            train: The function of a worker.
            global_step: See `start`.
            num_tokens: See `start`.
            token_policy: See `start`.
            timeout_s: See `start`.
            group: The processes; by default each worker is a thread of this one.
            stop: Ends the training when a signal comes, to any of the processes. The result says
                that it was stopped, on all ranks.

        Returns:
            The coordinator, closed, with its figures.

        Raises:
            Exception: what a worker raised, if the others could not do without it; and what the
                update raised. In other processes than the one that it came from, this is
                WorkerFailedError.
            ValueError: the group is not a chief and `total_num_replicas` workers; or the ranks have
                other variables or arguments.
            TypeError: the group's ranks cannot send messages, for they are no processes.
        """
        same = {
            "replicas_to_aggregate": self.replicas_to_aggregate,
            "total_num_replicas": self.total_num_replicas,
            "num_tokens": num_tokens,
            "token_policy": token_policy,
            "timeout_s": timeout_s,
        }
        return self._run_workers(
            train,
            global_step,
            self.total_num_replicas,
            check=partial(self._check_start, global_step, num_tokens, token_policy),
            open_coordinator=partial(
                self.start, global_step, num_tokens, token_policy=token_policy, timeout_s=timeout_s
            ),
            same=same,
            more_variables={},
            timeout_s=timeout_s,
            group=group,
            stop=stop,
        )

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Does what `SyncReplicasWorker.apply_gradients` does, for this thread's worker.

        Raises:
            ValueError: this thread is not inside `with sync.worker(index):`, besides what the
                worker's method raises.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name))

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        _check_arguments(request)
        worker = self._this_thread.worker
        if worker is None:
            raise ValueError(
                f'"{self._name}": apply_gradients() must be called inside `with sync.worker(index)'
                ":`, after start()"
            )
        pass_on(worker, request)

    def _make_worker(self, coordinator: Any, index: int) -> SyncReplicasWorker:
        return SyncReplicasWorker(self, coordinator, index)

    def _update(self, global_step: Any, pairs: Pairs, request: StepRequest | None = None) -> None:
        of_worker = request or StepRequest(None)
        request = of_worker._replace(pairs=pairs, global_step=global_step, name=None)
        if self._variable_averages is None:
            pass_on(self._optimizer, request)
            raise_refusal(self._optimizer)
            return
        with writing():  # so that a checkpoint holds the averages of its own step
            step = int(global_step)
            pass_on(self._optimizer, request)
            raise_refusal(self._optimizer)
            is_skipped = int(global_step) == step
            if not is_skipped:
                self._variable_averages.apply(self._variables_to_average)


class SyncReplicasWorker(Worker):
    """One worker's end: an optimizer whose `apply_gradients` contributes to the common step.

    Use it in a `with` statement: at its end, also by an exception, the other workers stop waiting
    for this one.

    Attributes:
        index: Which worker, from 0.
        local_step: The step that the worker's next gradient counts for.
    """

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Contributes gradients to the step, and waits until this worker may go on.

        Variables and `global_step` have been updated when it returns if this worker's gradients
        went into the step; `local_step` says which step the next ones count for.

        Args:
            grads_and_vars: (gradient, variable) pairs, for the same variables in every call and on
                every worker. Gradients are only read, and may change once this returns.
            global_step: The variable that the coordinator was started with.
            name: Ignored: the worker that completes a step applies it for all.

        Raises:
            ValueError: no pairs, no gradient, no or another global step, other variables than
                before, or what `Optimizer.apply_gradients` raises for a pair; nothing is
                contributed then.
            DeadlineExceededError: the step was not completed in time; the gradients stay.
            CancelledError: the coordinator was closed, or all other workers have finished.
            WorkerFailedError: a worker has failed, and the step cannot be completed without it.
            RuntimeError: called in a tower, or in a replica of a strategy.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name))

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        _check_arguments(request)
        context = replica_context()
        if context.strategy is not None or context.num_replicas > 1:
            raise RuntimeError(
                f'"{self._owner.get_name()}" cannot be used in a tower: write '
                "TowerOptimizer(SyncReplicasOptimizer(...)), so that a worker contributes what its "
                "towers bring together; nor in a replica of a strategy"
            )
        self._push(request)


def _check_arguments(request: StepRequest) -> None:
    if not request.pairs:
        raise ValueError("Must supply at least one variable")
    if request.global_step is None:
        raise ValueError("Global step is required to check staleness")


def _check_at_least_1(number: int, name: str) -> int:
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number
