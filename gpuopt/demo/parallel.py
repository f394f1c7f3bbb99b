"""Trains the demo's model with several workers, or with several towers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

from gpuopt.autodiff import with_gradients
from gpuopt.device import Device
from gpuopt.distributed import (
    Reduction,
    SyncReplicasOptimizer,
    SyncReplicasWorker,
    TowerOptimizer,
    WorkerFigures,
    replicate,
)
from gpuopt.optimizer import Optimizer
from gpuopt.variables.variable import Variable

# Takes images and labels; returns the loss and its (gradient, variable) pairs.
Differentiate = Callable[[Any, Any], tuple[float, list[tuple[Any, Variable]]]]


@dataclass
class Workers:
    """Trains with several workers: threads, each with its own batches.

    Attributes:
        figures: For each worker, how many gradients it computed and how long it waited so far.
    """

    optimizer: Optimizer
    differentiate: Differentiate
    batches: Sequence[Iterator[tuple[Any, Any]]]
    replicas_to_aggregate: int
    figures: list[WorkerFigures] = field(default_factory=list)

    def train_until(self, target: int, global_step: Variable) -> tuple[list[float], float]:
        """Trains until the global step is `target`.

        Returns:
            (losses, seconds): for each step, the mean loss of the gradients for it; and how long a
            worker was in the optimizer, on average and without its waiting time.
        """
        losses: defaultdict[int, list[float]] = defaultdict(list)
        optimizer_seconds = [0.0] * len(self.batches)

        def work(worker: SyncReplicasWorker) -> None:
            while worker.local_step < target:
                loss, grads_and_vars = self.differentiate(*next(self.batches[worker.index]))
                losses[worker.local_step].append(loss)
                started = perf_counter()
                worker.apply_gradients(grads_and_vars, global_step)
                optimizer_seconds[worker.index] += perf_counter() - started

        first = int(global_step)
        sync = SyncReplicasOptimizer(self.optimizer, self.replicas_to_aggregate, len(self.batches))
        figures = sync.run(work, global_step, token_policy="per_step").figures()
        waited = sum(worker.waited_s for worker in figures)
        earlier = self.figures or [WorkerFigures() for _ in figures]
        self.figures = [
            WorkerFigures(
                one.accepted + other.accepted,
                one.stale + other.stale,
                one.waited_s + other.waited_s,
            )
            for one, other in zip(earlier, figures, strict=True)
        ]
        in_optimizer = max(0.0, sum(optimizer_seconds) - waited) / len(figures)
        return [fmean(losses[step]) for step in range(first, target)], in_optimizer


def step_on_towers(
    optimizer: Optimizer,
    differentiate: Differentiate,
    global_step: Variable,
    devices: Sequence[Device],
) -> Callable[[Any, Any], tuple[float, float]]:
    """Makes a training step whose batch is split among towers.

    Returns:
        A function of images and labels. It returns the loss and the seconds spent on gradients.
    """
    tower_optimizer = TowerOptimizer(optimizer)
    differentiating = 0.0

    def model_fn(images: Any, labels: Any) -> float:
        nonlocal differentiating
        started = perf_counter()
        loss, grads_and_vars = differentiate(images, labels)
        differentiating += perf_counter() - started
        gradients = {variable: gradient for gradient, variable in grads_and_vars}
        tower_optimizer.minimize(with_gradients(lambda: (loss, gradients)), global_step)
        return loss

    train = replicate(model_fn, Reduction.MEAN, devices)

    def step(images: Any, labels: Any) -> tuple[float, float]:
        nonlocal differentiating
        differentiating = 0.0
        return train(images, labels), differentiating

    return step
