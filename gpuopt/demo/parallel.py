"""Trains the demo's model with several workers, towers or processes."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

from gpuopt.autodiff import with_gradients
from gpuopt.backends.cuda.availability import ask_driver
from gpuopt.device import Device
from gpuopt.distributed import (
    MirroredStrategy,
    MirroredVariable,
    MPIGroup,
    NCCLGroup,
    RankGroup,
    Reduction,
    SyncReplicasOptimizer,
    SyncReplicasWorker,
    TowerOptimizer,
    WorkerFigures,
    replicate,
)
from gpuopt.distributed.communicators.nccl_library import place_of
from gpuopt.optimizer import Optimizer
from gpuopt.variables.variable import Variable

# Takes images and labels; returns the loss and its (gradient, variable) pairs.
Differentiate = Callable[[Any, Any], tuple[float, list[tuple[Any, Variable]]]]


@dataclass
class Workers:
    """Trains with several workers, each with its own batches: threads, or processes with a chief.

    Attributes:
        group: The processes, if workers are no threads.
        figures: For each worker, how many gradients it computed and how long it waited so far.
    """

    optimizer: Optimizer
    differentiate: Differentiate
    batches: Sequence[Iterator[tuple[Any, Any]]]
    replicas_to_aggregate: int
    group: MPIGroup | None = None
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
        figures = sync.run(work, global_step, token_policy="per_step", group=self.group).figures()
        if self.group is not None:
            mine = dict(losses), optimizer_seconds
            [of_ranks] = self.group.run(lambda ranks: ranks.all_gather(mine, "losses"))
            losses.clear()
            for losses_of_rank, _ in of_ranks:
                for step, values in losses_of_rank.items():
                    losses[step] += values
            optimizer_seconds = [
                sum(times) for times in zip(*(s for _, s in of_ranks), strict=True)
            ]
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


def choose_device(group: MPIGroup, device: Device) -> Device:
    """Chooses where this process trains.

    Args:
        group: All processes.
        device: The CPU; or any GPU: the processes of a host take its GPUs in turn.
    """
    if device.kind == "cpu":
        return device
    return Device("gpu", group.rank_on_host % max(1, len(ask_driver().gpus)))


def _over_nccl(group: MPIGroup, device: Device) -> RankGroup:
    """Returns a group over NCCL if it is there, and each process has a GPU of its own."""
    found, mine = None, None
    if device.kind == "gpu":
        with suppress(ImportError):
            found = NCCLGroup([device], group)
            mine = socket.gethostname(), place_of(device.index)
    [told] = group.run(lambda communicator: communicator.all_gather(mine, "GPUs"))
    has_each = None not in told and len(set(told)) == len(told)
    return found if found is not None and has_each else group


class Ranks:
    """The processes of an MPI job, of which each trains on batches of its own.

    Attributes:
        rank: Of this process.
        device: Where it trains.
    """

    def __init__(self, group: MPIGroup, device: Device) -> None:
        """Takes a device for this process; see `choose_device`."""
        self.rank = group.rank
        self.device = choose_device(group, device)
        over = _over_nccl(group, self.device)
        self._strategy = MirroredStrategy([self.device], group=over)
        self._mirrored: list[MirroredVariable] = []

    def new_variable(self, value: Any, name: str, dtype: Any, device: Device) -> Variable:
        """Makes this process's copy of a variable that all processes make."""
        self._mirrored.append(self._strategy.variable(value, name=name, dtype=dtype))
        return self._mirrored[-1].replicas[0]

    def step_with(
        self, optimizer: Optimizer, differentiate: Differentiate, global_step: Variable
    ) -> Callable[[Any, Any], tuple[float, float]]:
        """Makes a training step of all processes.

        Returns:
            A function of images and labels. It returns the mean of all processes' losses, and the
            seconds that this one spent on gradients.
        """

        def train_replica(images: Any, labels: Any) -> tuple[float, float]:
            started = perf_counter()
            loss, grads_and_vars = differentiate(images, labels)
            differentiating = perf_counter() - started
            gradients = {variable: gradient for gradient, variable in grads_and_vars}
            optimizer.minimize(with_gradients(lambda: (loss, gradients)), global_step)
            return fmean(self._strategy.communicator.all_gather(loss, "losses")), differentiating

        def step(images: Any, labels: Any) -> tuple[float, float]:
            [(loss, seconds)] = self._strategy.run(train_replica, (images, labels)).values
            return loss, seconds

        return step
