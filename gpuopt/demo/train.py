"""The demo's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from gpuopt.autodiff import engine_of
from gpuopt.backends import backend_for, moved
from gpuopt.demo.digits import Digits, load_digits
from gpuopt.demo.model import WideAndDeep
from gpuopt.demo.parallel import Workers, step_on_towers
from gpuopt.demo.settings import make_optimizer
from gpuopt.device import Device
from gpuopt.distributed import WorkerFigures
from gpuopt.variable import Variable

BATCH_SIZE = 96
DEFAULT_STEPS = 1000
_STEPS_BETWEEN_EVALUATIONS = 50


@dataclass
class Result:
    """What a run has shown.

    Attributes:
        losses: Mean cross-entropy of each step's batch.
        accuracies: (step, accuracy on the training images, on the test images), in order.
        seconds: Spent in all steps, without evaluation.
        optimizer_seconds: Of these, spent in the optimizer.
        workers: What each worker has done, if there were several.
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
    on_step: Callable[[], None] = lambda: None,
) -> Result:
    """Trains the demo's model.

    Args:
        optimizer: A name of `settings.TUNED`.
        device: Where model and data live.
        dtype: What the weights are stored in.
        steps: How many batches to train on.
        seed: For the first weights and the order of the images.
        autodiff: Whether the loss is differentiated, instead of the gradients written by hand.
        workers: How many threads compute gradients for common steps.
        replicas_to_aggregate: How many of their gradients make a step; all, if not given.
        towers: How many parts each batch is split into.
        on_step: Called for each step, or after some for each of them.
    """
    backend = backend_for(device)
    train_set, test_set = load_digits()
    model = WideAndDeep(device, dtype, seed)
    # In host memory, where reading it waits for no GPU.
    global_step = Variable(0, name="global_step", trainable=False, dtype=np.int64)
    tuned = make_optimizer(optimizer, global_step)
    result = Result(device, optimizer)
    compute = partial(_differentiate, model) if autodiff else model.loss_and_gradients

    def differentiate(images: Any, labels: Any) -> tuple[float, list[tuple[Any, Variable]]]:
        with backend.active():
            return compute(moved(images, device), moved(labels, device))

    batches = [_batches(train_set, stream) for stream in range(seed, seed + workers)]
    team = Workers(tuned, differentiate, batches, replicas_to_aggregate or workers)
    on_towers = step_on_towers(tuned, differentiate, global_step, [device] * towers)

    def alone(images: Any, labels: Any) -> tuple[float, float]:
        started = perf_counter()
        loss, grads_and_vars = differentiate(images, labels)
        differentiating = perf_counter() - started
        tuned.apply_gradients(grads_and_vars, global_step=global_step)
        return loss, differentiating

    one_step = alone if towers == 1 else on_towers
    for target in [*range(_STEPS_BETWEEN_EVALUATIONS, steps, _STEPS_BETWEEN_EVALUATIONS), steps]:
        if workers > 1:
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
        seen, unseen = (_accuracy(model, device, digits) for digits in (train_set, test_set))
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


def _batches(digits: Digits, seed: int) -> Iterator[Digits]:
    """Goes through the images in ever new orders."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(digits.labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            chosen = order[start : start + BATCH_SIZE]
            yield Digits(digits.images[chosen], digits.labels[chosen])


def _accuracy(model: WideAndDeep, device: Device, digits: Digits) -> float:
    with backend_for(device).active():
        guesses = model.scores(moved(digits.images, device)).argmax(axis=1)
    return float((moved(guesses, Device.cpu) == digits.labels).mean())
