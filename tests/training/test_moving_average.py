"""ExponentialMovingAverage, where the golden cases do not cover it."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from interrupt_at import Interrupt, InterruptAt

import gpuopt
from gpuopt import ExponentialMovingAverage, Variable


def test_average_is_the_geometric_series() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 3))
    w = Variable(values[0], name="w")
    average = ExponentialMovingAverage(0.75)
    for value in values:
        w.assign(value)
        average.apply([w])
    expected = textbook.exponential_moving_average(values[0], values, decay=0.75)
    np.testing.assert_allclose(average.average(w).numpy(), expected, rtol=1e-12)


def test_debiased_average_of_a_function_weights_all_values_alike_at_decay_one() -> None:
    values = iter([1.0, 2.0, 6.0])
    average = ExponentialMovingAverage(0.999999, zero_debias=True)

    def loss() -> np.float64:
        return np.float64(next(values))

    for _ in range(3):
        average.apply([loss])
    assert float(average.average(loss)) == pytest.approx(3.0, rel=1e-5)
    assert average.average(loss).name == "loss/ExponentialMovingAverage"


@pytest.mark.parametrize("decay", [1.5, -0.25, np.nan, np.float32(2), 7])
def test_a_decay_that_makes_no_average_is_refused(decay: Any) -> None:
    with pytest.raises(ValueError, match=f"decay must be from 0 to 1, got {decay}"):
        gpuopt.ExponentialMovingAverage(decay)


def test_number_of_updates_bounds_the_decay() -> None:
    w = Variable(np.float64(0), name="w")
    updates = Variable(1, name="updates", trainable=False)
    average = ExponentialMovingAverage(0.25, num_updates=updates, name="foo_avg")
    average.apply([w])
    w.assign(np.float64(1))
    average.apply([w])
    assert average.average(w).name == "w/foo_avg"
    assert float(average.average(w)) == pytest.approx(1 - 2 / 11, rel=1e-6)


def test_default_is_every_trainable_variable() -> None:
    w = Variable([1.0], name="w")
    frozen = Variable([1.0], name="frozen", trainable=False)
    average = ExponentialMovingAverage(0.9)
    average.apply()
    assert average.average(w) is not None
    assert average.average(frozen) is None
    assert not average.average(w).trainable
    average.apply()  # the average is not averaged, and made only once
    assert [v.name for v in gpuopt.global_variables()] == [
        "w",
        "frozen",
        "w/ExponentialMovingAverage",
    ]


def test_variables_to_restore_load_averages_as_weights() -> None:
    w, b = Variable([1.0], name="w"), Variable([1.0], name="b")
    step = Variable(0, name="global_step", trainable=False)
    average = ExponentialMovingAverage(0.9)
    average.apply([w])
    assert average.variables_to_restore() == {
        "w/ExponentialMovingAverage": w,
        "b/ExponentialMovingAverage": b,
        "global_step": step,
    }
    assert average.variables_to_restore([w]) == {
        "w/ExponentialMovingAverage": w,
        "b": b,
        "global_step": step,
    }


def test_integer_variable_is_refused_before_any_average_changes() -> None:
    w, counter = Variable([1.0], name="w"), Variable([1], name="counter")
    average = ExponentialMovingAverage(0.9)
    with pytest.raises(TypeError, match='"counter" has dtype int32'):
        average.apply([w, counter])
    assert average.average(w) is None


def test_a_function_made_in_each_step_keeps_nothing_and_is_mentioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    average = ExponentialMovingAverage(0.5, zero_debias=True)
    for number in range(4):
        average.apply([lambda number=number: np.float32(number)])
        assert len(caplog.records) == min(number, 1)
    assert gpuopt.global_variables() == []
    message = caplog.records[0].getMessage()
    assert '"<lambda>"' in message
    assert message.endswith("starts again; make it once, before the loop")


def test_functions_of_one_kind_and_methods_have_averages_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model:
        def norm(self) -> Any:
            return np.float32(8)

    model = Model()
    average = ExponentialMovingAverage(0.5)
    functions = [lambda number=number: np.float32(number) for number in (2, 4)]
    for _ in range(2):
        average.apply([*functions, model.norm])
    found = [average.average(each) for each in (*functions, model.norm)]
    assert [float(each) for each in found] == [1.5, 3, 6]
    assert not caplog.records


def test_function_of_another_shape_is_refused_before_any_average_changes() -> None:
    w, shape = Variable([1.0], name="w"), (2,)
    average = ExponentialMovingAverage(0.5)

    def total() -> Any:
        return np.ones(shape, np.float32)

    average.apply([w, total])
    w.assign([3.0])
    shape = (3,)
    with pytest.raises(ValueError, match=r'"total/.*" has shape \(2,\).* has shape \(3,\)'):
        average.apply([w, total])
    assert average.average(w).numpy().tolist() == [1]


def test_average_may_overflow_without_a_warning() -> None:
    w = Variable(np.float32([3e38]))
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign(np.float32([-3e38]))
    average.apply([w])
    assert average.average(w).numpy().tolist() == [-np.inf]


def test_an_average_of_16_bits_is_rounded_once() -> None:
    """So differences that 16 bits cannot hold, or would round, do no harm."""
    w = Variable(np.float16([6e4, 1.0]))
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign(np.float16([-6e4, 1 - 2.0**-11]))
    average.apply([w])
    assert average.average(w).numpy().tolist() == [0, 1]


def test_raw_array_is_averaged_while_its_memory_lives() -> None:
    w = np.ones(3, np.float32)
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    w[:] = 3
    average.apply([w])
    assert average.average(w[:]).numpy().tolist() == [2, 2, 2]
    shadow = weakref.ref(average.average(w))
    del w
    assert shadow() is None


def test_bfloat16_averages_in_float32() -> None:
    w = Variable(np.ones(2, ml_dtypes.bfloat16), name="w")
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign(np.full(2, 3, ml_dtypes.bfloat16))
    average.apply([w])
    assert average.average(w).numpy().astype(np.float32).tolist() == [2, 2]


def test_a_variable_alone_is_not_taken_for_a_list() -> None:
    w = Variable(np.ones((2, 3), np.float32), name="w")
    average = ExponentialMovingAverage(0.9)
    with pytest.raises(TypeError, match="var_list must be a list of variables, got Variable of"):
        average.apply(w)
    with pytest.raises(TypeError, match="var_list must be a list of variables, got ndarray"):
        average.track(np.ones((2, 3), np.float32))
    with pytest.raises(TypeError, match="var_list must be a list of variables, got function"):
        average.apply(lambda: np.float32(1))
    assert average.average(w) is None


def test_an_exception_at_any_moment_leaves_numpys_warnings_as_they_were() -> None:
    w = Variable(np.ones(3), name="w")
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    moment = 0
    with np.errstate(all="warn"):
        before = np.geterr()
        while True:
            moment += 1
            interrupt = InterruptAt(moment)
            with suppress(Interrupt), interrupt:
                average.apply([w])
            assert np.geterr() == before, moment
            if interrupt.left > 0:
                break
    assert moment > 20
