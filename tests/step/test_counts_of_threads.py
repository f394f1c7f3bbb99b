"""Steps of several threads are all counted, also where GPUs decide about some of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from other_thread import in_threads, repeated

import gpuopt
from gpuopt import LossScaleOptimizer, Variable, backends
from gpuopt.step import device_scaling

pytestmark = pytest.mark.gpu

BETA1 = np.float32(0.5)
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda rate: gpuopt.AdamOptimizer(rate, BETA1),
    "skip": lambda rate: gpuopt.AdamOptimizer(rate, BETA1, on_nonfinite="skip"),
    "raise": lambda rate: gpuopt.AdamOptimizer(rate, BETA1, on_nonfinite="raise"),
    "scale": lambda rate: LossScaleOptimizer(
        gpuopt.AdamOptimizer(rate, BETA1), gpuopt.FixedLossScaleManager(4.0)
    ),
}


@pytest.fixture
def threads_that_alternate() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def on_gpu(value: float) -> Any:
    return backends.to_device(np.full(3, value, np.float32), gpuopt.Device.parse("gpu:0"))


def num_made(optimizer: Any) -> float:
    """The steps that the power of beta1 has: it is exact, as beta1 is 1 / 2."""
    numbers = optimizer.state_dict()["non_slots"]
    return float(-np.log2(numbers["beta1_power"])) - 1


@pytest.mark.parametrize(
    "kinds", ["skip skip", "plain skip", "raise plain skip", "scale skip scale"]
)
@pytest.mark.usefixtures("threads_that_alternate")
def test_optimizers_of_several_threads_may_count_in_one_global_step(
    kinds: str, every_schedule: str
) -> None:
    step = Variable(0, name="step", trainable=False)
    rate = gpuopt.exponential_decay(0.1, step, 3, 0.99)
    optimizers = [OPTIMIZERS[kind](rate) for kind in kinds.split()]
    variables = [Variable(np.zeros(3, np.float32), device="gpu:0") for _ in optimizers]
    good, bad = on_gpu(1), on_gpu(np.nan)
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.apply_gradients([(good, variable)], step)
    all_begin = threading.Barrier(len(optimizers))

    def work(kind: str, optimizer: Any, variable: Variable) -> None:
        all_begin.wait()
        for at in range(20):
            is_bad = at % 5 == 4 and kind in ("skip", "scale")
            optimizer.apply_gradients([(bad if is_bad else good, variable)], step)

    every = zip(kinds.split(), optimizers, variables, strict=True)
    in_threads(*(partial(work, *each) for each in every))
    made = [17 if kind in ("skip", "scale") else 21 for kind in kinds.split()]
    assert [num_made(each) for each in optimizers] == made
    assert int(step) == sum(made)


@pytest.mark.parametrize("use_locking", [False, True])
@pytest.mark.usefixtures("threads_that_alternate")
def test_what_a_thread_adds_to_the_global_step_is_not_lost_beside_steps(
    use_locking: bool, every_schedule: str
) -> None:
    step = Variable(0, name="step", trainable=False)
    optimizers = [OPTIMIZERS[kind](0.1) for kind in ("skip", "scale")]
    good, bad = on_gpu(1), on_gpu(np.nan)
    num_added = 0

    def add() -> None:
        nonlocal num_added
        time.sleep(0.0005)
        step.assign_add(1, use_locking)
        num_added += 1

    def work(optimizer: Any) -> None:
        variable = Variable(np.zeros(3, np.float32), device="gpu:0")
        for at in range(50):
            optimizer.apply_gradients([(bad if at % 5 == 4 else good, variable)], step)

    with repeated(add):
        in_threads(*(partial(work, each) for each in optimizers))
    assert int(step) == 80 + num_added


@pytest.mark.parametrize("kind", ["skip", "raise"])
def test_a_step_that_the_host_decides_about_is_counted_beside_one_of_another_thread(
    kind: str, every_schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Variable(0, name="step", trainable=False)
    optimizer = OPTIMIZERS[kind](0.1)
    first, new = (Variable(np.zeros(3, np.float32), device="gpu:0") for _ in range(2))
    good = on_gpu(1)
    for _ in range(2):
        optimizer.apply_gradients([(good, first)], step)
    look = device_scaling.first_nonfinite

    def look_while_another_steps(pairs: Any) -> Any:
        in_threads(lambda: optimizer.apply_gradients([(good, first)], step))
        return look(pairs)

    monkeypatch.setattr(device_scaling, "first_nonfinite", look_while_another_steps)
    optimizer.apply_gradients([(good, new)], step)  # its slots are new: the host decides
    assert (int(step), num_made(optimizer)) == (4, 4)
