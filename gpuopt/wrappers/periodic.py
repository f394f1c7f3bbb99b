"""PeriodicWrapper: workers that train by themselves, and meet after every few steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import numpy as np

from gpuopt.distributed.communicator import say_who
from gpuopt.distributed.first_rank import broadcast_all
from gpuopt.distributed.wrapper import check_inside_of_workers
from gpuopt.optimizer import Optimizer
from gpuopt.step.additions import Forget, nothing_to_forget
from gpuopt.step.request import StepRequest, make_step
from gpuopt.step.step import checked_global_step
from gpuopt.step.updates import Updates
from gpuopt.variables.gate import writing
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import StepWrapper, at_least_1, refuse_replicas
from gpuopt.wrappers.local_variables import LocalVariable, LocalVariables, copies_of

# What is to be written at the end of a meeting.
Assignments = list[tuple[Variable, Any]]


class PeriodicWrapper(StepWrapper):
    """Base of contrib's optimizers whose workers exchange variables after every few local steps.

    Each worker is a rank of the getter's communicator. It has variables of its own, which `opt`
    updates by the worker's own gradients. When all have made `period` local steps, they meet: a
    subclass overrides `_exchange`. What they exchange are the variables that any worker has trained
    since they last met.

    A local step counts for the period even if `opt` has skipped it, so that all workers meet.
    """

    is_for_workers = True

    # Whether a meeting counts once for each worker in the global step, and not once for all.
    _counts_workers: ClassVar[bool] = True
    _needs_global_step: ClassVar[bool] = False
    # What must be the same on all workers, beside the period, as text.
    _exchange_settings: str = ""

    def __init__(
        self,
        opt: Optimizer,
        num_worker: int,
        custom_getter: LocalVariables,
        getter_type: type[LocalVariables],
        period: tuple[str, int],
        use_locking: bool,
        name: str,
    ) -> None:
        """Wraps `opt`.

        Args:
            opt: Makes the local steps; its state is this optimizer's.
            num_worker: How many workers there are.
            custom_getter: Makes the variables.
            getter_type: What `custom_getter` must be.
            period: The argument's name, and after how many local steps the workers meet.
            use_locking: See `Optimizer`.
            name: See `Optimizer`.

        Raises:
            TypeError: `opt` is no optimizer, `custom_getter` is something else, or a number is no
                integer.
            ValueError: a number is less than 1, the communicator has not `num_worker` ranks, or
                `opt` is for workers itself.
        """
        if not isinstance(custom_getter, getter_type):
            raise TypeError(
                f"the custom getter must be of {getter_type.__name__}, got {custom_getter!r}"
            )
        check_inside_of_workers(opt, type(self).__name__)
        self._getter = custom_getter
        self._communicator = custom_getter.communicator
        self._num_worker = at_least_1("num_worker", num_worker)
        self._period = at_least_1(*period)
        if self._num_worker != self._communicator.size:
            raise ValueError(
                f"num_worker is {num_worker}, and the communicator of the custom getter has "
                f"{self._communicator.size} ranks: each worker is one of them, as by "
                f"{getter_type.__name__}(communicator=communicator)"
            )
        # The numbers of the variables that were updated since the workers have met.
        self._trained: set[int] = set()
        self._local_step = Variable(
            0, custom_getter.name_here("local_step"), trainable=False, dtype=np.int64
        )
        super().__init__(opt, use_locking, name)

    @property
    def local_step(self) -> Variable:
        """How many local steps this worker has made."""
        return self._local_step

    def apply_gradients(  # type: ignore[override]  # as in TensorFlow: no aggregation to skip
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
    ) -> None:
        """Makes a local step; at the end of a period, waits for all workers and exchanges.

        All workers make the same number of calls, each from one thread at a time.

        Args:
            grads_and_vars: (gradient, variable) pairs, as of `Optimizer.apply_gradients`, for
                variables that the custom getter has made.
            global_step: A scalar variable that counts the exchanges; this process's own, or that of
                all workers in it.
            name: See `Optimizer.apply_gradients`.

        Raises:
            ValueError: a variable was not made by the custom getter, or `ModelAverageOptimizer`
                gets no global step; nothing has been written then. Or workers meet that have made
                different numbers of steps, or of which some have a global step and others none.
            RuntimeError: this is a replica of a strategy, or a tower.
            DeadlineExceededError, WorkerFailedError, CancelledError: see `Communicator`.

        Besides what `Optimizer.apply_gradients` raises.
        """
        make_step(self, StepRequest(grads_and_vars, global_step, name))

    def _apply_request(self, request: StepRequest, **own: Any) -> None:
        refuse_replicas(self)
        global_step = request.global_step
        if global_step is None and self._needs_global_step:
            raise ValueError("Global step is required")
        counter = None if global_step is None else checked_global_step(global_step)
        local_step = self._local_step
        # Not while a worker waits for others: who saves would hold those back, and wait for this.
        with writing() if self._communicator.size == 1 else nullcontext():
            before = int(local_step)
            super()._apply_request(request._replace(global_step=local_step))
            if int(local_step) == before:
                local_step.assign_add(1)
            if int(local_step) % self._period == 0:
                # A step that a GPU refuses must not count for the exchange.
                self.check()
                self._meet(counter)

    def get_init_op(self, task_index: int | None = None) -> None:
        """Has all workers begin at the global centers of rank 0, at once, with `local_step` 0.

        All workers call this before they go on from a checkpoint. New variables need it not.

        Args:
            task_index: This worker's rank; it is checked if given.

        Raises:
            ValueError: there are no variables, workers have different ones, or `task_index` is
                another worker's.
        """
        self._check_worker(task_index, None)
        made = self._getter.made()
        if not made:
            raise ValueError(
                f"there are no variables: make them by {type(self._getter).__name__}.variable "
                "before they are initialized"
            )
        names = [each.name for each in made]
        self._communicator.barrier(f'the initialization of "{self._name}" with {names}')
        centers = copies_of(each.center for each in made)
        centers = broadcast_all(self._communicator, centers, 0)
        with writing():
            for each, center in zip(made, centers, strict=True):
                each.center.assign(center)
                each.variable.assign(center)
                if each.companion is not None:
                    each.companion.assign(self._getter.initial_companion(center))
            self._local_step.assign(0)
            self._trained.clear()

    @contextmanager
    def make_session_run_hook(
        self, is_chief: bool | None = None, task_index: int | None = None
    ) -> Iterator[None]:
        """Returns a context that does `get_init_op` when it is entered.

        Args:
            is_chief: Whether this worker is rank 0; it is checked if given.
            task_index: This worker's rank; likewise.

        Raises:
            ValueError: this worker is another one; or see `get_init_op`.
        """
        self._check_worker(task_index, is_chief)
        self.get_init_op()
        yield

    def _check_worker(self, task_index: int | None, is_chief: bool | None) -> None:
        """Raises ValueError if this worker is told to be another one."""
        rank = self._communicator.rank
        if task_index is not None and task_index != rank:
            raise ValueError(f"task_index is {task_index}; this worker is rank {rank}")
        if is_chief is not None and bool(is_chief) != (rank == 0):
            raise ValueError(
                f"is_chief is {is_chief} for the worker that is rank {rank}: rank 0 is the chief"
            )

    def _exchange(self, trained: Sequence[LocalVariable]) -> Assignments:
        """Does what workers do when they meet, and returns what is to be written in the end."""
        raise NotImplementedError

    def _meet(self, counter: Variable | None) -> None:
        count = None if counter is None else counter.numpy().item()
        of_ranks = self._communicator.all_gather(
            (sorted(self._trained), count),
            f'the exchange of "{self._name}" after local step {int(self._local_step)}'
            f"{self._exchange_settings}",
        )
        counts = [count for _, count in of_ranks]
        if None in counts and counts.count(None) < len(counts):
            brought = ["no global step" if count is None else "one" for count in counts]
            raise ValueError(f"all workers need a global step, or none: {say_who(brought)}")
        numbers = sorted(set().union(*(numbers for numbers, _ in of_ranks)))
        made = self._getter.made()
        assignments = self._exchange([made[number] for number in numbers])
        with writing():
            for variable, value in assignments:
                variable.assign(value)
            if counter is not None:
                # Also where all workers have the same variable.
                num_steps = self._num_worker if self._counts_workers else 1
                counter.assign(counts[0] + num_steps)
            self._trained.clear()

    # What the local step calls: see `Addition`.

    def _prepare_updates(self, optimizer: Any, updates: Updates) -> tuple[Updates, Forget]:
        for variable in updates.variables():
            self._getter.find(variable)
        return updates, nothing_to_forget

    def _before_update(self, updates: Updates, ledger: Any) -> None:
        self._trained.update(self._getter.find(v).number for v in updates.variables())
