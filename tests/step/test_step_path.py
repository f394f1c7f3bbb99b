"""A known step enters few of gpuopt's functions, and does not wander among its modules."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import fake_cupy
import numpy as np
import pytest

import gpuopt
from gpuopt import IndexedSlices, Variable

PACKAGE = str(Path(gpuopt.__file__).parent)


class StepPath(NamedTuple):
    """The functions of gpuopt entered on this thread, comprehensions apart."""

    calls: int
    modules: int
    moves: int


def on_a_new_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Has a test cut memory from a new block.

    If a block ends between two variables, they are gathered: a longer path.
    """

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *arguments, **named).result()

    return run


def path_of(step: Any) -> StepPath:
    files: list[str] = []

    def enter(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            files.append(code.co_filename)

    # A collection would call what drops dead variables.
    gc.collect()
    gc.disable()
    sys.setprofile(enter)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    moves = sum(before != after for before, after in itertools.pairwise(files))
    return StepPath(len(files), len(set(files)), moves)


def steady_path(
    gradient: Any, variable: Variable, make: Callable[[float], Any] = gpuopt.AdamOptimizer
) -> StepPath:
    optimizer = make(0.1)
    pairs = [(gradient, variable)]
    for _ in range(6):
        optimizer.apply_gradients(pairs)
    return path_of(lambda: optimizer.apply_gradients(pairs))


@on_a_new_thread
def test_a_steady_dense_step_takes_a_short_path() -> None:
    path = steady_path(np.ones(64, np.float32), Variable(np.ones(64, np.float32)))
    assert 10 < path.calls <= 45
    assert path.modules <= 18
    assert path.moves <= 39


@pytest.mark.parametrize(("name", "most"), [("AdamOptimizer", 75), ("LazyAdamOptimizer", 65)])
@on_a_new_thread
def test_a_steady_sparse_step_takes_a_short_path(name: str, most: int) -> None:
    rows = IndexedSlices(np.ones((3, 8), np.float32), np.array([1, 2, 1]))
    table = Variable(np.ones((1000, 8), np.float32))
    assert 10 < steady_path(rows, table, getattr(gpuopt, name)).calls <= most


@pytest.mark.parametrize("extra", [1, 10])
@on_a_new_thread
def test_the_path_is_as_long_for_many_variables_as_for_one(extra: int) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1)
    pairs = [(np.ones(64, np.float32), Variable(np.ones(64, np.float32))) for _ in range(1 + extra)]
    for _ in range(6):
        optimizer.apply_gradients(pairs)
    assert path_of(lambda: optimizer.apply_gradients(pairs)).calls <= 45


@pytest.mark.parametrize("extra", [1, 10])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@on_a_new_thread
def test_the_path_of_gradients_that_are_cast_does_not_grow_with_their_number(
    dtype: Any, extra: int
) -> None:
    optimizer = gpuopt.AdamOptimizer(0.1, gradient_dtype="cast")
    pairs = [(np.ones(64, dtype), Variable(np.ones(64, np.float32))) for _ in range(1 + extra)]
    for _ in range(6):
        optimizer.apply_gradients(pairs)
    assert path_of(lambda: optimizer.apply_gradients(pairs)).calls <= 75


@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize(("is_sparse", "most"), [(False, 58), (True, 145)])
def test_a_steady_step_on_a_gpu_takes_a_short_path(is_sparse: bool, most: int) -> None:
    with fake_cupy.cuda.Device(0):
        values, rows = fake_cupy.asarray(np.ones((3, 8), np.float32)), fake_cupy.arange(3)
    gradient = IndexedSlices(values, rows) if is_sparse else values
    variable = Variable(np.ones((3, 8), np.float32), device="gpu:0")
    path = steady_path(gradient, variable, gpuopt.LazyAdamOptimizer)
    assert 10 < path.calls <= most


@pytest.mark.usefixtures("emulated_gpus")
def test_a_steady_step_of_all_features_on_a_gpu_takes_a_limited_path() -> None:
    table = Variable(np.ones((1000, 8), np.float32), device="gpu:0", name="table")
    bias = Variable(np.ones(64, np.float32), device="gpu:0", name="bias")
    inner = gpuopt.LazyAdamOptimizer(
        0.1,
        clip_norm=1.0,
        averages=gpuopt.ExponentialMovingAverage(0.99),
        groups=[gpuopt.ParameterGroup(variables=[bias], learning_rate=0.01)],
    )
    manager = gpuopt.ExponentialUpdateLossScaleManager(2.0**15, incr_every_n_steps=2000)
    optimizer = gpuopt.LossScaleOptimizer(inner, manager)
    global_step = Variable(0, trainable=False)

    def pairs() -> list[Any]:
        with fake_cupy.cuda.Device(0):
            values = fake_cupy.asarray(np.full((3, 8), 2.0**15, np.float32))
            rows = IndexedSlices(values, fake_cupy.asarray(np.array([1, 2, 1])))
            return [(rows, table), (fake_cupy.asarray(np.full(64, 2.0**15, np.float32)), bias)]

    for _ in range(8):
        optimizer.apply_gradients(pairs(), global_step)
    given = pairs()
    path = path_of(lambda: optimizer.apply_gradients(given, global_step))
    assert 100 < path.calls <= 470
    optimizer.check()
