"""DropStaleGradientOptimizer: gradients that were computed too many steps ago are dropped."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from gpuopt.distributed.communicator import RankGroup
from gpuopt.distributed.coordinator import Coordinator
from gpuopt.distributed.gathering import Pairs
from gpuopt.distributed.remote_coordinator import RemoteCoordinator
from gpuopt.distributed.stale_coordinator import StaleGradientCoordinator
from gpuopt.distributed.stop_request import StopRequest
from gpuopt.distributed.waiting import DEFAULT_TIMEOUT_S
from gpuopt.distributed.workers_optimizer import (
    ThisThread,
    Worker,
    WorkersOptimizer,
    check_counter,
    raise_refusal,
)
from gpuopt.locks import Lock
from gpuopt.optimizer import Optimizer
from gpuopt.step.pairs import Gradient
from gpuopt.step.request import StepRequest, make_step, pass_on
from gpuopt.variables.gate import writing
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import refuse_replicas


class _ThisThread(ThisThread):
    """What a thread does with the optimizer.

    Attributes:
        counter: The global step of the call of `minimize` that this thread is in, or None.
        local_step: The global step when this thread last began to compute gradients, or None.
    """

    counter: Variable | None = None
    local_step: int | None = None


class DropStaleGradientOptimizer(WorkersOptimizer):
    """Drops gradients that were computed more than `staleness` steps ago, as contrib's does.

    For workers that train the same variables without waiting for each other. `compute_gradients`
    reads the global step before the loss; if it has grown by more than `staleness` when the
    gradients are applied, they are dropped and counted instead. Gradients are applied one after the
    other, in the order in which they come, so the bound holds for every update.

        optimizer = DropStaleGradientOptimizer(MomentumOptimizer(0.1, 0.9), staleness=2)

        def train(worker):
            for batch in batches_of(worker.index):
                worker.minimize(lambda: loss(w, batch), global_step, [w])

        optimizer.run(train, global_step, num_workers=3)  # in three threads
        optimizer.run(train, global_step, group=MPIGroup())  # in all processes but the first

    Threads of the user's own may share the optimizer, too, and call its `minimize` outside of
    `run`.

    For a global step on a GPU, the host waits in each call.

    Attributes:
        stale_counter: How many gradients were dropped: a variable, which a `Saver` saves, and
            `state_dict` leaves out.
    """

    def __init__(
        self,
        opt: Optimizer,
        staleness: int,
        use_locking: bool = False,
        name: str = "DropStaleGradient",
        *,
        global_step: Any = None,
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Applies the gradients; its state is this optimizer's.
            staleness: How many steps of other workers may come between a gradient's computation
                and its use.
            use_locking: See `Optimizer`.
            name: See `Optimizer`.
            global_step: The scalar integer variable that counts steps. `minimize` is told it;
                `compute_gradients`, called by itself, needs it here.

        Raises:
            TypeError: `opt` is no optimizer, or an argument has a wrong type.
            ValueError: `opt` is for workers itself, as `SyncReplicasOptimizer`.
        """
        super().__init__(opt, use_locking, name)
        try:
            self._staleness = operator.index(staleness)
        except TypeError as error:
            raise TypeError(f"staleness must be an integer, got {staleness!r}") from error
        self._global_step = None if global_step is None else _checked_counter(global_step)
        self._applying = Lock(f'the updates of "{name}"')
        self._this_thread: _ThisThread = _ThisThread()
        self.stale_counter = Variable(0.0, "stale_counter", trainable=False)

    def run(
        self,
        train: Callable[[DropStaleGradientWorker], Any],
        global_step: Any = None,
        num_workers: int | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: RankGroup | None = None,
        stop: StopRequest | None = None,
    ) -> Coordinator:
        """Runs `train(worker)` for every worker, each in its own thread, or its own process.

        The workers do not wait for each other. When one returns or fails, the others go on; the
        failure is logged, or raised in the end if all workers have failed. When an update fails, or
        `stop` asks for it, all workers end, and have `timeout_s` seconds to do so.

        With a group, as `MPIGroup()`, all of its processes call this. Rank 0 is the chief: it calls
        `train` for nobody, has the optimizer's state, and applies gradients in the order in which
        they come. Rank `i + 1` is worker `i`. Variables are those that are trainable when `run`
        begins, the same by name on all ranks. They, `global_step` and `stale_counter` begin with
        the chief's values; a worker gets them anew whenever it has handed over gradients, also if
        these are dropped, and all ranks have the chief's in the end.

        Args:
            train: The function of a worker.
            global_step: The scalar integer variable that counts steps; by default the
                constructor's.
            num_workers: How many threads; with a group, all ranks but the first are workers.
            timeout_s: How long threads have to end. In a process, a worker waits for the chief's
                answer for twice that time, in seconds.
            group: The processes; by default each worker is a thread of this one.
            stop: Ends the training when a signal comes, to any of the processes. The result says
                that it was stopped, on all ranks.

        Returns:
            The coordinator, closed, with its figures.

        Raises:
            Exception: what the last worker raised, if all have failed; and what an update raised.
                In other processes than the one that it came from, this is WorkerFailedError.
            ValueError: no global step, or no number of workers; the group has another number of
                them; or the ranks have other variables or arguments.
            TypeError: the group's ranks cannot send messages, for they are no processes.
            RuntimeError: another `run` is not over; or this is a replica of a strategy, or a tower.
        """
        refuse_replicas(self)
        counter = self._find_counter(global_step)
        if num_workers is None and group is None:
            raise ValueError(f'"{self._name}": run() needs num_workers, or a group of processes')
        if num_workers is None:
            assert group is not None
            num_workers = group.size - 1
        if num_workers < 1:
            raise ValueError(
                f'"{self._name}" needs at least 1 worker, got {num_workers}; in a group, rank 0 is '
                "the chief and no worker"
            )

        def open_coordinator() -> Coordinator:
            self._close_last()
            self._coordinator = coordinator = StaleGradientCoordinator(
                partial(self._apply_pushed, counter),
                counter,
                [self.stale_counter],
                total_num_replicas=num_workers,
                timeout_s=timeout_s,
            )
            return coordinator

        return self._run_workers(
            train,
            counter,
            num_workers,
            check=lambda: None,
            open_coordinator=open_coordinator,
            same={"staleness": self._staleness, "timeout_s": timeout_s},
            more_variables={"stale_counter": self.stale_counter},
            timeout_s=timeout_s,
            group=group,
            stop=stop,
        )

    def minimize(self, loss: Any, global_step: Any = None, *args: Any, **kwargs: Any) -> None:
        """Computes gradients, and applies or drops them; see `Optimizer.minimize`.

        Args:
            loss: See `Optimizer.minimize`, also for the other arguments.
            global_step: The scalar integer variable that counts steps.
            *args: Likewise.
            **kwargs: Likewise.

        Raises:
            ValueError: no global step is given, here or to the constructor; or see there.
        """
        counter = self._find_counter(global_step)
        outer = self._this_thread.counter
        try:
            self._this_thread.counter = counter
            super().minimize(loss, counter, *args, **kwargs)
        finally:
            self._this_thread.counter = outer

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        """Reads the global step, and asks the optimizer inside; see `Optimizer.compute_gradients`.

        Raises:
            ValueError: no global step is known: the constructor was given none, and this is neither
                part of `minimize` nor of a worker's function.
        """
        this_thread = self._this_thread
        local_step = int(self._find_counter(this_thread.counter))
        if this_thread.worker is None:
            this_thread.local_step = local_step
        else:
            this_thread.worker.local_step = local_step
        return super().compute_gradients(*args, **kwargs)

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        *,
        local_step: int | None = None,
    ) -> None:
        """Applies gradients, or drops them if they are stale.

        In a worker's function, this does what `DropStaleGradientWorker.apply_gradients` does.

        Args:
            grads_and_vars: See `Optimizer.apply_gradients`.
            global_step: The scalar integer variable that counts steps; by default the
                constructor's.
            name: See `Optimizer.apply_gradients`.
            local_step: The global step that the gradients were computed at; by default when this
                thread last called `compute_gradients`.

        Raises:
            ValueError: there is no global step, or no local step.
            RuntimeError: this is a replica of a strategy, or a tower; or a process of a worker, in
                another thread than the worker's.

        Besides what `Optimizer.apply_gradients` raises, if the gradients are not stale.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name), local_step=local_step)

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        refuse_replicas(self)
        counter, local_step = self._find_counter(request.global_step), own.get("local_step")
        request = request._replace(global_step=counter)
        worker = self._this_thread.worker
        if worker is not None:
            if local_step is not None:
                worker.local_step = local_step
            pass_on(worker, request)
            return
        if isinstance(self._coordinator, RemoteCoordinator) and not self._coordinator.is_closed:
            raise RuntimeError(
                f'"{self._name}" is in a run whose chief is another process: apply gradients on '
                "the thread that the worker's function was called on"
            )
        if local_step is None:
            local_step = self._this_thread.local_step
        if local_step is None:
            raise ValueError(
                f'"{self._name}" does not know at which step these gradients were computed: call '
                "compute_gradients in this thread, or pass local_step=int(global_step), read "
                "before they were"
            )
        self._apply_or_drop(request, local_step)

    def _apply_pushed(
        self, counter: Variable, pairs: Pairs, local_step: int, request: StepRequest | None
    ) -> bool:
        of_worker = request or StepRequest(None)
        request = of_worker._replace(pairs=pairs, global_step=counter, name=None)
        return self._apply_or_drop(request, local_step)

    def _apply_or_drop(self, request: StepRequest, local_step: int) -> bool:
        """Returns whether the gradients were not stale, and so applied."""
        with writing(), self._applying:
            is_stale = int(request.global_step) - local_step > self._staleness
            if is_stale:
                self.stale_counter.assign_add(1)
            else:
                pass_on(self._inner, request)
                raise_refusal(self._inner)
        return not is_stale

    def _find_counter(self, global_step: Any) -> Variable:
        """Returns the global step that is given, or else the worker's, or the constructor's."""
        if global_step is not None:
            return _checked_counter(global_step)
        worker = self._this_thread.worker
        return _checked_counter(self._global_step if worker is None else worker.global_step)

    def _make_worker(self, coordinator: Any, index: int) -> DropStaleGradientWorker:
        return DropStaleGradientWorker(self, coordinator, index)


class DropStaleGradientWorker(Worker):
    """One worker's end: an optimizer whose `apply_gradients` makes a step if it is not stale.

    `DropStaleGradientOptimizer.run` makes it. In the worker's function, the optimizer itself does
    the same.

    Attributes:
        index: Which worker, from 0.
        local_step: The step that the worker's next gradients are computed at: when
            `compute_gradients` was called, or else when it last handed over gradients.
    """

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        """Reads the global step, and asks the optimizer inside; see `Optimizer.compute_gradients`.

        In a process, the variables are those of this step until gradients are handed over.
        """
        self.local_step = int(self.global_step)
        return self._owner._inner.compute_gradients(*args, **kwargs)

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Hands gradients over, which are applied, or dropped if they are stale.

        Variables and `global_step` have been updated when it returns, also if the gradients were
        dropped; `local_step` says at which step the next ones are computed.

        Args:
            grads_and_vars: See `Optimizer.apply_gradients`. Gradients are only read, and may change
                once this returns.
            global_step: The variable that the run was started with; need not be given.
            name: Ignored.

        Raises:
            ValueError: no gradient, another global step, a variable that was not there when the run
                began, or what `Optimizer.apply_gradients` raises for a pair; nothing is handed over
                then.
            DeadlineExceededError: the chief does not answer.
            CancelledError: the run is over.
            WorkerFailedError: an update has failed, or the chief.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name))

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        refuse_replicas(self)
        if request.global_step is None:
            request = request._replace(global_step=self.global_step)
        self._push(request)


def _checked_counter(global_step: Any) -> Variable:
    if global_step is None:
        raise ValueError(
            "Global step is required to check staleness: pass it to minimize, or to "
            "DropStaleGradientOptimizer(..., global_step=global_step)"
        )
    return check_counter(global_step, "tell stale gradients")
