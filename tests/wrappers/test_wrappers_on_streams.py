"""Wrappers on GPUs whose streams run late, in any order that CUDA allows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import every_dtype
from gpu_streams import new_stream, uploaded, wait_for_gpus

import gpuopt
from gpuopt import IndexedSlices, Variable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("every_schedule")]


class Model:
    """A weight and a table on a GPU, and their gradients, uploaded before."""

    def __init__(self, wrap: Any, dtype: Any = np.float32, device: int = 0) -> None:
        place = f"gpu:{device}"
        self.weight = Variable(np.zeros(50, dtype), name="weight", device=place)
        self.table = Variable(np.zeros((6, 4), dtype), name="table", device=place)
        self.gradient = uploaded(np.full(50, -1).astype(dtype), device=device)
        self.zeros = uploaded(np.zeros(50, dtype), device=device)
        self.values = uploaded(np.full((3, 4), -1).astype(dtype), device=device)
        self.rows = uploaded(np.array([0, 2, 2]), device=device)
        self.bad_rows = uploaded(np.array([0, 2, 6]), device=device)
        self.optimizer = wrap(gpuopt.GradientDescentOptimizer(1.0), self)
        wait_for_gpus()

    def step(self, rows: Any = None) -> None:
        rows = self.rows if rows is None else rows
        pairs = [(self.gradient, self.weight), (IndexedSlices(self.values, rows), self.table)]
        self.optimizer.apply_gradients(pairs)


def average(opt: gpuopt.Optimizer, model: Model) -> gpuopt.Optimizer:
    return gpuopt.MovingAverageOptimizer(opt, 0.5)


def clip(opt: gpuopt.Optimizer, model: Model) -> gpuopt.Optimizer:
    return gpuopt.VariableClippingOptimizer(opt, {model.weight: [0], model.table: [1]}, 4.0)


def multitask(opt: gpuopt.Optimizer, model: Model) -> gpuopt.Optimizer:
    return gpuopt.MultitaskOptimizerWrapper(opt)


@every_dtype
def test_averages_follow_steps_on_any_stream(dtype: Any) -> None:
    streams = [new_stream() for _ in range(3)]
    model = Model(average, dtype)
    for stream in streams:
        with stream:
            model.step()
    averages = model.optimizer.averages
    # 0.5, 1.25, 2.125
    for variable, expected in ((model.weight, 2.125), (model.table, 0.0)):
        got = averages.average(variable).numpy().astype(np.float64)
        want = np.full(variable.shape, expected)
        if variable is model.table:
            want[0], want[2] = 2.125, 4.25
        np.testing.assert_array_equal(got, want)


@every_dtype
def test_clipping_follows_the_step_on_any_stream(dtype: Any) -> None:
    streams = [new_stream() for _ in range(3)]
    model = Model(clip, dtype)
    for stream in streams:
        with stream:
            model.step()
    weight = model.weight.numpy().astype(np.float64)
    tolerance = 8 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(weight, 4 / np.sqrt(50), rtol=tolerance)
    rows = model.table.numpy().astype(np.float64)
    np.testing.assert_allclose(rows[[0, 2]], 2, rtol=tolerance)
    assert not rows[[1, 3, 4, 5]].any()


@pytest.mark.parametrize("wrap", [average, clip])
def test_neither_a_refused_step_nor_those_since_leave_anything(wrap: Any) -> None:
    streams = [new_stream() for _ in range(2)]
    model = Model(wrap)
    model.step()
    before = [variable.numpy() for variable in gpuopt.global_variables()]
    with pytest.raises(IndexError, match="row 6 is not in"):  # noqa: PT012
        with streams[0]:
            model.step(model.bad_rows)
        with streams[1]:
            model.step()
        model.optimizer.check()
    for variable, value in zip(gpuopt.global_variables(), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, variable.name)
    model.step()
    assert model.weight.numpy()[0] == (2 if wrap is average else pytest.approx(4 / np.sqrt(50)))


def test_zeros_are_read_after_the_stream_that_writes_them() -> None:
    stream = new_stream()
    model = Model(multitask)
    with stream:
        gradient = model.gradient * 0
        model.optimizer.apply_gradients([(gradient, model.weight)])
        gradient = gradient - 1
        model.optimizer.apply_gradients([(gradient, model.weight)])
    np.testing.assert_array_equal(model.weight.numpy(), np.ones(50))


@pytest.mark.gpus(2)
def test_zeros_of_two_gpus_are_found() -> None:
    one, two = Model(multitask), Model(multitask, device=1)
    for first, second in ((one.gradient, two.zeros), (one.zeros, two.gradient)):
        one.optimizer.apply_gradients([(second, two.weight), (first, one.weight)])
    np.testing.assert_array_equal(one.weight.numpy(), np.ones(50))
    np.testing.assert_array_equal(two.weight.numpy(), np.ones(50))


@pytest.mark.gpus(2)
def test_gradients_of_two_gpus_have_one_norm() -> None:
    one, two = Model(average), Model(average, device=1)
    pairs = [
        (one.gradient, one.weight),
        (IndexedSlices(two.values, two.rows), two.table),
        (two.gradient, two.weight),
    ]
    clipped, norm = gpuopt.clip_gradients_by_global_norm(pairs, 1.0)
    expected = np.sqrt(50 + 50 + 12)
    assert float(norm) == pytest.approx(expected)
    gpuopt.GradientDescentOptimizer(expected).apply_gradients(clipped)
    np.testing.assert_allclose(one.weight.numpy(), 1, rtol=1e-5)
    np.testing.assert_allclose(two.table.numpy()[2], 2, rtol=1e-5)
