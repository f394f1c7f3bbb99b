"""Accumulators follow TensorFlow's rules, serve takes in turn, and let nobody wait for ever."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from golden_cases import check, read_json

import gpuopt
from gpuopt import (
    CancelledError,
    ConditionalAccumulator,
    DeadlineExceededError,
    IndexedSlices,
    SparseConditionalAccumulator,
)

TOLERANCES = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-12}
SOON_S = 0.05
LONG_S = 20.0


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Starts the function in a thread; returns a function that waits for its result or error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(LONG_S)
        assert not thread.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return join


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waiting(accumulator: Any) -> int:
    return len(accumulator._turns)


def rows(indices: list[int], values: Any, dtype: Any = np.float32) -> IndexedSlices:
    values = np.array(values, dtype).reshape(len(indices), -1 if indices else 1)
    return IndexedSlices(values, np.array(indices, np.int64))


def row_sums(indices: Any, values: Any, height: int = 10) -> np.ndarray[Any, Any]:
    """Returns the sum of each row's values; NaN for rows without any."""
    values = np.asarray(values, np.float64)
    sums = np.full((height, *values.shape[1:]), np.nan)
    for index, value in zip(indices, values, strict=True):
        sums[index] = np.nan_to_num(sums[index]) + value
    return sums


# What TensorFlow did.


@pytest.mark.parametrize("number", range(len(read_json("accumulators.json"))))
def test_accumulates_as_tensorflow_does(number: int, caplog: pytest.LogCaptureFixture) -> None:
    case = read_json("accumulators.json")[number]
    dtype = np.dtype(case["dtype"])
    tolerance = TOLERANCES[case["dtype"]]
    accumulator: Any
    if case["kind"] == "dense":
        accumulator = ConditionalAccumulator(dtype, case["shape"], case["reduction"])
    else:
        accumulator = SparseConditionalAccumulator(dtype, (None, case["cols"]), case["reduction"])
    for position, event in enumerate(case["events"]):
        key = f"{number}/{position}"
        if event["op"] == "set":
            accumulator.set_global_step(event["step"])
        elif event["op"] == "apply" and case["kind"] == "dense":
            accumulator.apply_grad(np.array(event["grad"], dtype), event["local_step"])
        elif event["op"] == "apply":
            values = np.array(event["values"], dtype).reshape(-1, case["cols"])
            slices = IndexedSlices(values, np.array(event["indices"], np.int64))
            accumulator.apply_grad(slices, event["local_step"])
        elif "error" in event:
            with pytest.raises(ValueError, match="num_required must be at least 1"):
                accumulator.take_grad(event["num_required"])
        elif event.get("would_block"):
            with pytest.raises(DeadlineExceededError):
                accumulator.take_grad(event["num_required"], timeout_s=SOON_S)
        elif case["kind"] == "dense":
            taken = accumulator.take_grad(event["num_required"])
            assert taken.dtype == dtype
            check("accumulators", key, taken, event["result"], tolerance)
        else:
            taken = accumulator.take_grad(event["num_required"])
            assert (taken.dtype, taken.dense_shape) == (dtype, None)
            assert event["shape_out"] == [-1, case["cols"]]
            assert taken.indices.tolist() == sorted(set(event["indices_out"]))
            got = row_sums(taken.indices, taken.values)
            expected = row_sums(event["indices_out"], event["values_out"])
            check("accumulators", key, got, expected, tolerance)
        assert accumulator.num_accumulated() == event["num_accumulated_after"], key


# What TensorFlow's files do not hold.


def test_unsorted_and_repeated_rows_are_merged() -> None:
    accumulator = SparseConditionalAccumulator(np.float32)
    accumulator.apply_grad(rows([5, 1, 5], [1, 2, 3]))
    accumulator.apply_grad(rows([1, 7], [4, 5]))
    taken = accumulator.take_grad(2)
    assert taken.indices.tolist() == [1, 5, 7]
    assert taken.values.ravel().tolist() == [(2 + 4) / 2, 1 + 3, 5]


def test_a_row_is_divided_by_the_gradients_that_touch_it() -> None:
    accumulator = SparseConditionalAccumulator(np.float32)
    for slices in (rows([0, 1], [3, 3]), rows([1], [5]), rows([], [])):
        accumulator.apply_grad(slices)
    taken = accumulator.take_grad(3)
    assert dict(zip(taken.indices.tolist(), taken.values.ravel(), strict=True)) == {0: 3, 1: 4}


def test_int32_rows_stay_int32_and_a_declared_height_comes_back() -> None:
    accumulator = SparseConditionalAccumulator(np.float32, (8, 1), "SUM")
    for _ in range(2):
        accumulator.apply_grad(IndexedSlices(np.ones((1, 1), np.float32), np.int32([7])))
    taken = accumulator.take_grad(2)
    assert (taken.indices.dtype, taken.dense_shape) == (np.int32, (8, 1))
    assert taken.values.tolist() == [[2]]


def test_a_gradient_may_change_after_it_was_given() -> None:
    dense, sparse = ConditionalAccumulator(np.float32), SparseConditionalAccumulator(np.float32)
    gradient, slices = np.ones(2, np.float32), rows([0, 3], [1, 1])
    dense.apply_grad(gradient)
    sparse.apply_grad(slices)
    gradient[:] = slices.values[:] = 9
    slices.indices[:] = 5
    assert dense.take_grad(1).tolist() == [1, 1]
    taken = sparse.take_grad(1)
    assert (taken.indices.tolist(), taken.values.tolist()) == ([0, 3], [[1], [1]])


@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_what_was_taken_stays_as_it_is(reduction: Any) -> None:
    accumulator = ConditionalAccumulator(np.float32, (2,), reduction)
    accumulator.apply_grad([1.0, 2.0])
    taken = accumulator.take_grad(1)
    accumulator.apply_grad([5.0, 5.0], local_step=1)
    assert taken.tolist() == [1, 2]


def test_float16_is_added_up_in_float32() -> None:
    accumulator = ConditionalAccumulator(np.float16, (), "MEAN")
    for value in (60000, 60000, 1):  # their sum is beyond float16
        accumulator.apply_grad(np.float16(value))
    assert accumulator.take_grad(3) == np.float16(120001 / 3)


def test_an_unknown_shape_is_the_first_gradients_until_the_take() -> None:
    accumulator = ConditionalAccumulator(np.float32)
    accumulator.apply_grad(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(2, 3\)"):
        accumulator.apply_grad(np.zeros((3, 2), np.float32))
    assert accumulator.take_grad(1).shape == (2, 3)
    accumulator.apply_grad(np.zeros(4, np.float32), local_step=1)
    assert accumulator.take_grad(1).shape == (4,)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (np.zeros(3, np.float32), ValueError, r"\(3,\).*\(None, 2\)"),
        (np.zeros((1, 2), np.float64), TypeError, "float64.*float32"),
        ([[1.0], [2.0, 3.0]], ValueError, "inhomogeneous"),
    ],
)
def test_a_wrong_gradient_is_refused_and_not_counted(
    gradient: Any, error: type[Exception], message: str
) -> None:
    accumulator = ConditionalAccumulator(np.float32, (None, 2), name="w/grad_accum")
    with pytest.raises(error, match=message):
        accumulator.apply_grad(gradient)
    assert accumulator.num_accumulated() == 0


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (np.zeros((2, 2), np.float32), TypeError, "must be IndexedSlices, got ndarray"),
        (rows([0], [1, 2], np.float64), TypeError, "float64.*float32"),
        (rows([0], [1, 2, 3]), ValueError, r"\(1, 3\).*\(None, 2\)"),
        (rows([0, 4], [1, 2, 3, 4]), IndexError, r"indices\[1\] = 4 is not in \[0, 4\)"),
        (rows([-1], [1, 2]), IndexError, r"indices\[0\] = -1"),
        (IndexedSlices(np.ones((1, 2), np.float32), [0], (5, 2)), ValueError, r"\(5, 2\).*\(4, 2"),
    ],
)
def test_wrong_slices_are_refused_and_not_counted(
    gradient: Any, error: type[Exception], message: str
) -> None:
    accumulator = SparseConditionalAccumulator(np.float32, (4, 2))
    with pytest.raises(error, match=message):
        accumulator.apply_grad(gradient)
    assert accumulator.num_accumulated() == 0


def test_rows_of_another_width_are_refused_until_the_take() -> None:
    accumulator = SparseConditionalAccumulator(np.float32)
    accumulator.apply_grad(rows([0], [1, 2]))
    with pytest.raises(ValueError, match="shape"):
        accumulator.apply_grad(rows([0], [1]))
    accumulator.take_grad(1)
    assert accumulator.apply_grad(rows([0], [1]), local_step=1)


def test_a_global_step_that_goes_back_is_logged_and_takes_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    accumulator = ConditionalAccumulator(np.float32, (), name="w/grad_accum")
    accumulator.set_global_step(5)
    assert not accumulator.apply_grad(1.0, local_step=4)
    with caplog.at_level(logging.WARNING):
        accumulator.set_global_step(3)
    assert "w/grad_accum" in caplog.text
    assert accumulator.apply_grad(1.0, local_step=4)


# Waiting.


@pytest.mark.internal
def test_takes_are_served_in_the_order_they_were_called() -> None:
    accumulator = ConditionalAccumulator(np.float32, ())
    first = in_thread(lambda: accumulator.take_grad(2, LONG_S))
    until(lambda: waiting(accumulator) == 1)
    second = in_thread(lambda: accumulator.take_grad(1, LONG_S))
    until(lambda: waiting(accumulator) == 2)
    accumulator.apply_grad(1.0)
    time.sleep(SOON_S)
    assert waiting(accumulator) == 2  # one gradient would do for the second, whose turn is not yet
    accumulator.apply_grad(3.0)
    assert first() == 2
    accumulator.apply_grad(7.0, local_step=1)
    assert second() == 7


@pytest.mark.internal
def test_a_take_that_gives_up_lets_the_next_one_through() -> None:
    accumulator = ConditionalAccumulator(np.float32, ())
    first = in_thread(lambda: accumulator.take_grad(2, 4 * SOON_S))
    until(lambda: waiting(accumulator) == 1)
    second = in_thread(lambda: accumulator.take_grad(1, LONG_S))
    until(lambda: waiting(accumulator) == 2)
    accumulator.apply_grad(1.0)
    with pytest.raises(DeadlineExceededError, match=r"1 of 2 gradients have come within 0\.2 s"):
        first()
    assert second() == 1


@pytest.mark.internal
def test_closing_cancels_waiting_takes_and_later_calls() -> None:
    accumulator = ConditionalAccumulator(np.float32, (), name="w/grad_accum")
    take = in_thread(lambda: accumulator.take_grad(1, LONG_S))
    until(lambda: waiting(accumulator) == 1)
    accumulator.close()
    for call in (take, lambda: accumulator.take_grad(1), lambda: accumulator.apply_grad(1.0)):
        with pytest.raises(CancelledError, match="w/grad_accum"):
            call()


@pytest.mark.internal
@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
def test_nothing_waits_for_ever(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        ConditionalAccumulator(np.float32).take_grad(1, timeout_s)


@pytest.mark.internal
def test_concurrent_gradients_are_all_counted() -> None:
    accumulator = ConditionalAccumulator(np.float64, (), "SUM")
    joins = [
        in_thread(lambda: [accumulator.apply_grad(np.float64(1)) for _ in range(200)])
        for _ in range(4)
    ]
    for join in joins:
        join()
    assert accumulator.take_grad(800) == 800


def test_errors_are_gpuopts_own_and_of_the_builtin_kind() -> None:
    assert issubclass(DeadlineExceededError, (gpuopt.GpuoptError, TimeoutError))
    assert issubclass(CancelledError, (gpuopt.GpuoptError, RuntimeError))
