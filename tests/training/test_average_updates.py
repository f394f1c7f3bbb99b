"""Averages are moved together, as if one after the other, in one launch of each kind."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator.emulator import EmulatorLauncher

import gpuopt
from gpuopt import ExponentialMovingAverage, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device

pytestmark = pytest.mark.value

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GPU = Device.parse("gpu:0")


def moved(average: Any, value: Any, decay: float) -> Any:
    """One move, in the type that averages have."""
    real = np.float64 if average.dtype == np.float64 else np.float32
    weight = real(np.float32(1) - np.float32(decay))
    wide, new = average.astype(real), np.asarray(value).astype(real)
    return np.asarray(wide - (wide - new) * weight, real)


def test_averages_of_all_types_and_forms_are_moved_at_once() -> None:
    rng = np.random.default_rng(0)
    strided = np.zeros((6, 8), np.float32)[::2, ::2]
    given: list[Any] = [strided]
    for dtype in (np.float16, BFLOAT16, np.float32, np.float64):
        given += [Variable(np.zeros(shape, dtype)) for shape in [(), (0,), (5,), (70, 200)]]
    average = ExponentialMovingAverage(0.7)
    expected: list[Any] = []
    for _ in range(4):
        values = [np.asarray(rng.normal(size=each.shape)).astype(each.dtype) for each in given]
        for each, value in zip(given, values, strict=True):
            each[...] = value
        average.apply(given)
        before = expected or values
        expected = [moved(*pair, 0.7) for pair in zip(before, values, strict=True)]
        for each, theirs in zip(given, expected, strict=True):
            mine = average.average(each)
            assert mine is not None
            assert mine.numpy().tobytes() == theirs.tobytes()


def test_a_variable_that_is_named_twice_moves_its_average_twice() -> None:
    w, other = Variable(np.zeros(2, np.float32)), Variable(np.zeros(2, np.float32))
    average = ExponentialMovingAverage(0.5)
    average.track([w])
    w.assign(np.float32([4, 8]))
    average.apply([w, other, w])
    assert average.average(w).numpy().tolist() == [3, 6]


@pytest.mark.parametrize("first", ["variable", "average"])
def test_an_average_of_an_average_follows_in_the_order_of_the_list(first: str) -> None:
    w = Variable(np.zeros(2, np.float32))
    average = ExponentialMovingAverage(0.5)
    [of_w] = average.track([w])
    [of_average] = average.track([of_w])
    w.assign(np.float32([4, 8]))
    average.apply([w, of_w] if first == "variable" else [of_w, w])
    assert of_w.numpy().tolist() == [2, 4]
    assert of_average.numpy().tolist() == ([1, 2] if first == "variable" else [0, 0])


def test_an_average_of_another_type_reads_a_value_before_it_is_moved() -> None:
    """The update of float64 is another one, which comes later."""
    wide, w = Variable(np.zeros(2, np.float64)), Variable(np.zeros(2, np.float32))
    average = ExponentialMovingAverage(0.5)
    [of_w] = average.track([w])

    def total() -> Any:
        return of_w

    average.track([total, wide])
    for value in (4, 8):
        wide.assign(np.full(2, value, np.float64))
        w.assign(np.full(2, value, np.float32))
        average.apply([wide, total, w])
    assert of_w.numpy().tolist() == [5, 5]
    assert average.average(total).numpy().tolist() == [1, 1]


def test_rows_that_come_and_go_are_averaged() -> None:
    table = Variable(np.zeros((2, 3), np.float32))
    average = ExponentialMovingAverage(0.5)
    for _ in range(2):
        table.assign(table.numpy() + 2)
        average.apply([table])
    gpuopt.rows(table).append(np.float32([[8, 8, 8]]))
    table.assign(np.full((3, 3), 6, np.float32))
    average.apply([table])
    assert average.average(table).numpy().tolist() == [[4.5] * 3] * 2 + [[7] * 3]
    gpuopt.rows(table).keep(np.array([2]))
    average.apply([table])
    assert average.average(table).numpy().tolist() == [[6.5] * 3]


def test_values_of_functions_may_change_their_type() -> None:
    values = iter([np.float32(4), np.float64(8), 16, Variable(np.float64(32))])

    def loss() -> Any:
        return next(values)

    average = ExponentialMovingAverage(0.5)
    for expected in (2, 5, 10.5, 21.25):
        average.apply([loss])
        found = average.average(loss)
        assert found.dtype == np.float32
        assert float(found) == expected


def test_each_function_is_corrected_by_how_often_it_was_averaged() -> None:
    def often() -> Any:
        return np.float32([2, 4])

    def seldom() -> Any:
        return np.float64([6, 8])

    average = ExponentialMovingAverage(0.75, zero_debias=True)
    for number in range(4):
        average.apply([often, seldom] if number % 2 else [often])
        np.testing.assert_allclose(average.average(often).numpy(), [2, 4], rtol=1e-6)
        if number:
            np.testing.assert_allclose(average.average(seldom).numpy(), [6, 8], rtol=1e-7)


@pytest.mark.emulator
def test_a_gpu_moves_all_averages_of_a_type_in_one_launch(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    rng = np.random.default_rng(1)
    shapes = [(), (3, 5), (200,)] * 3
    types = [np.float32, BFLOAT16, np.float32, BFLOAT16]
    variables = [
        Variable(np.asarray(rng.normal(size=shape)).astype(dtype), device="gpu:0")
        for dtype in types
        for shape in shapes
    ]
    counted = Variable(np.int64(0))
    average = ExponentialMovingAverage(0.7, counted)
    average.track(variables)
    expected = [each.numpy() for each in variables]
    for count in range(1, 4):
        values = [np.asarray(rng.normal(size=v.shape)).astype(v.dtype) for v in variables]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(to_device(value, GPU))
        counted.assign(count)
        before = emulated_gpus[0].launches
        average.apply(variables)
        assert emulated_gpus[0].launches - before == 2
        decay = np.float32(1 + count) / np.float32(10 + count)
        expected = [moved(*pair, decay) for pair in zip(expected, values, strict=True)]
    for variable, theirs in zip(variables, expected, strict=True):
        assert average.average(variable).numpy().tobytes() == theirs.tobytes()


@pytest.mark.emulator
def test_a_gpu_corrects_all_averages_of_functions_in_one_launch_more(
    emulated_gpus: list[EmulatorLauncher],
) -> None:
    w = Variable(np.float32(3), device="gpu:0")
    losses = [to_device(np.float32(value), GPU) for value in (2, 4, 8)]
    functions = [lambda value=value: value for value in losses]
    average = ExponentialMovingAverage(0.75, zero_debias=True)
    for step in range(3):
        before = emulated_gpus[0].launches
        average.apply([w, *functions])
        assert step == 0 or emulated_gpus[0].launches - before == 2
        for function, value in zip(functions, (2, 4, 8), strict=True):
            assert float(average.average(function)) == pytest.approx(value, rel=1e-6)
    assert float(average.average(w)) == 3
