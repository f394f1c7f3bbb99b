"""The demo's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from gpuopt.autodiff import engine_of
from gpuopt.backends import backend_for, to_device
from gpuopt.demo.digits import Digits, load_digits
from gpuopt.demo.model import WideAndDeep
from gpuopt.demo.parallel import Ranks, Workers, step_on_towers
from gpuopt.demo.settings import make_optimizer
from gpuopt.device import Device
from gpuopt.distributed import MPIGroup, WorkerFigures
from gpuopt.variables.variable import Variable

BATCH_SIZE = 96
DEFAULT_STEPS = 1000
_STEPS_BETWEEN_EVALUATIONS = 50


@dataclass
class Result:
    """The results of one run.

    Attributes:
        losses: Mean cross-entropy of each step's batch.
        accuracies: (step, accuracy on the training images, on the test images), by step.
        seconds: The time of all steps, without evaluation.
        optimizer_seconds: The part of `seconds` that was spent in the optimizer.
        workers: Each worker's figures, if there were several workers.
    """

    device: Device
    optimizer: str
    losses: list[float] = field(default_factory=list)
    accuracies: list[tuple[int, float, float]] = field(default_factory=list)
    seconds: float = 0.0
    optimizer_seconds: float = 0.0
    workers: list[WorkerFigures] = field(default_factory=list)


def train(
    optimizer: str,
    *,
    device: Device,
    dtype: np.dtype[Any],
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    autodiff: bool = False,
    workers: int = 1,
    replicas_to_aggregate: int | None = None,
    towers: int = 1,
    ranks: Ranks | None = None,
    group: MPIGroup | None = None,
    learning_rate: float | None = None,
    digits: tuple[Digits, Digits] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Result:
    """Trains the demo's model.

    Args:
        optimizer: A name of `settings.NAMES`.
        device: Where model and data are.
        dtype: The dtype of the weights.
        steps: How many batches to train on.
        seed: For the first weights and the order of the images.
        autodiff: Differentiate the loss, instead of using gradients written by hand.
        workers: How many threads, or processes, compute gradients for the same steps.
        replicas_to_aggregate: How many workers' gradients make a step; by default, all.
        towers: How many parts each batch is split into.
        ranks: The processes that train together, if there are several; `device` is then theirs.
        group: The processes that the workers are, each on `device`, and before them a chief; by
            default, workers are threads.
        learning_rate: The optimizer's; by default that of `settings`.
        digits: Images to train with and to test with; by default all that there are.
        on_step: Called once for each step. With several workers, the calls for up to 50 steps come
            together.
    """
    device = device if ranks is None else ranks.device
    backend = backend_for(device)
    train_set, test_set = digits or load_digits()
    new_variable = Variable if ranks is None else ranks.new_variable
    model = WideAndDeep(device, dtype, seed, new_variable)
    # In host memory, so that reading it does not wait for a GPU.
    global_step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    tuned = make_optimizer(optimizer, global_step, learning_rate)
    result = Result(device, optimizer)
    compute = partial(_differentiate, model) if autodiff else model.loss_and_gradients

    def differentiate(images: Any, labels: Any) -> tuple[float, list[tuple[Any, Variable]]]:
        with backend.enter():
            return compute(to_device(images, device), to_device(labels, device))

    first = seed if ranks is None else seed + ranks.rank
    batches = [_iterate_batches(train_set, stream) for stream in range(first, first + workers)]
    team = Workers(tuned, differentiate, batches, replicas_to_aggregate or workers, group)
    on_towers = step_on_towers(tuned, differentiate, global_step, [device] * towers)

    def step_alone(images: Any, labels: Any) -> tuple[float, float]:
        started = perf_counter()
        loss, grads_and_vars = differentiate(images, labels)
        differentiating = perf_counter() - started
        tuned.apply_gradients(grads_and_vars, global_step=global_step)
        return loss, differentiating

    one_step = step_alone if towers == 1 else on_towers
    if ranks is not None:
        one_step = ranks.step_with(tuned, differentiate, global_step)
    for target in [*range(_STEPS_BETWEEN_EVALUATIONS, steps, _STEPS_BETWEEN_EVALUATIONS), steps]:
        if workers > 1 or group is not None:
            started = perf_counter()
            losses, optimizer_seconds = team.train_until(target, global_step)
            result.seconds += perf_counter() - started
            result.optimizer_seconds += optimizer_seconds
            result.losses += losses
            for _ in losses:
                on_step()
        while len(result.losses) < target:
            images, labels = next(batches[0])
            started = perf_counter()
            loss, differentiating = one_step(images, labels)
            elapsed = perf_counter() - started
            result.losses.append(loss)
            result.seconds += elapsed
            result.optimizer_seconds += elapsed - differentiating
            on_step()
        seen, unseen = (
            _measure_accuracy(model, device, digits) for digits in (train_set, test_set)
        )
        result.accuracies.append((target, seen, unseen))
    result.workers = team.figures
    return result


def _differentiate(
    model: WideAndDeep, images: Any, labels: Any
) -> tuple[float, list[tuple[Any, Variable]]]:
    def loss() -> Any:
        return model.loss(images, labels)

    value, grads_and_vars = engine_of(loss).compute(loss, model.variables)
    return float(value), grads_and_vars


def _iterate_batches(digits: Digits, seed: int) -> Iterator[Digits]:
    """Yields batches without end; each pass over the images has a new order."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(digits.labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            yield Digits(digits.images[chosen], digits.labels[chosen])


def _measure_accuracy(model: WideAndDeep, device: Device, digits: Digits) -> float:
    with backend_for(device).enter():
        guesses = model.scores(to_device(digits.images, device)).argmax(axis=1)
    return float((to_device(guesses, Device.cpu) == digits.labels).mean())
