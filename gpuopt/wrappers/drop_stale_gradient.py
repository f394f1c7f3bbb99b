"""DropStaleGradientOptimizer: gradients that were computed too many steps ago are dropped."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from typing import Any

from gpuopt.distributed.wrapper import OptimizerWrapper, check_inside_of_workers
from gpuopt.locks import Lock
from gpuopt.optimizer import Optimizer
from gpuopt.step.pairs import Gradient
from gpuopt.step.step import checked_global_step
from gpuopt.variables.gate import writing
from gpuopt.variables.variable import Variable
from gpuopt.wrappers.base import refuse_replicas


class _ThisThread(threading.local):
    """What a thread does with the optimizer.

    Attributes:
        counter: The global step of the call of `minimize` that this thread is in, or None.
        local_step: The global step when this thread last began to compute gradients, or None.
    """

    counter: Variable | None = None
    local_step: int | None = None


class DropStaleGradientOptimizer(OptimizerWrapper):
    """Drops gradients that were computed more than `staleness` steps ago, as contrib's does.

    For workers that are threads, train the same variables without waiting for each other, and
    share this optimizer. `compute_gradients` reads the global step before the loss; if it has grown
    by more than `staleness` when the gradients are applied, they are dropped and counted instead.
    Workers take turns in `apply_gradients`, so the bound holds for every update.

        optimizer = DropStaleGradientOptimizer(MomentumOptimizer(0.1, 0.9), staleness=2)

        def train():  # in several threads
            for batch in batches:
                optimizer.minimize(lambda: loss(w, batch), global_step, [w])

    For a global step on a GPU, the host waits in each call.

    Attributes:
        stale_counter: How many gradients were dropped: a variable, which a `Saver` saves, and
            `state_dict` leaves out.
    """

    is_for_workers = True

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
        # First, as another thread may save as soon as this optimizer is listed among the living.
        self._optimizer = check_inside_of_workers(opt, type(self).__name__)
        try:
            self._staleness = operator.index(staleness)
        except TypeError:
            raise TypeError(f"staleness must be an integer, got {staleness!r}") from None
        self._global_step = None if global_step is None else _checked_counter(global_step)
        super().__init__(use_locking, name)
        self._applying = Lock(f'the updates of "{name}"')
        self._this_thread = _ThisThread()
        self.stale_counter = Variable(0.0, "stale_counter", trainable=False)

    @property
    def _inner(self) -> Optimizer:
        return self._optimizer

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
        if global_step is None:
            global_step = self._global_step
        outer = self._this_thread.counter
        try:
            self._this_thread.counter = _checked_counter(global_step)
            super().minimize(loss, global_step, *args, **kwargs)
        finally:
            self._this_thread.counter = outer

    def compute_gradients(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[Gradient | None, Variable]]:
        """Reads the global step, and asks the optimizer inside; see `Optimizer.compute_gradients`.

        Raises:
            ValueError: no global step is known: the constructor was given none, and this is not
                part of `minimize`.
        """
        counter = self._this_thread.counter
        counter = _checked_counter(self._global_step if counter is None else counter)
        self._this_thread.local_step = int(counter)
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

        Args:
            grads_and_vars: See `Optimizer.apply_gradients`.
            global_step: The scalar integer variable that counts steps; by default the
                constructor's.
            name: See `Optimizer.apply_gradients`.
            local_step: The global step that the gradients were computed at; by default when this
                thread last called `compute_gradients`.

        Raises:
            ValueError: there is no global step, or no local step.
            RuntimeError: this is a replica of a strategy, or a tower.

        Besides what `Optimizer.apply_gradients` raises, if the gradients are not stale.
        """
        refuse_replicas(self)
        counter = _checked_counter(self._global_step if global_step is None else global_step)
        if local_step is None:
            local_step = self._this_thread.local_step
        if local_step is None:
            raise ValueError(
                f'"{self._name}" does not know at which step these gradients were computed: call '
                "compute_gradients in this thread, or pass local_step=int(global_step), read "
                "before they were"
            )
        with writing(), self._applying:
            if int(counter) - local_step <= self._staleness:
                self._inner.apply_gradients(grads_and_vars, counter, name)
            else:
                self.stale_counter.assign_add(1)


def _checked_counter(global_step: Any) -> Variable:
    if global_step is None:
        raise ValueError(
            "Global step is required to check staleness: pass it to minimize, or to "
            "DropStaleGradientOptimizer(..., global_step=global_step)"
        )
    counter = checked_global_step(global_step)
    if counter.dtype.kind not in "iu":
        raise TypeError(
            f'global_step "{counter.name}" must be an integer to tell stale gradients, got dtype '
            f"{counter.dtype}"
        )
    return counter
