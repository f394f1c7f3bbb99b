"""ExponentialMovingAverage, where the golden cases do not cover it."""

from __future__ import annotations

import os
import signal
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import textbook
from interrupt_at import Interrupt, each_moment

import gpuopt
from gpuopt import ExponentialMovingAverage, Variable
from gpuopt.training.average_updates import AverageUpdates


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


@pytest.mark.internal
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


def test_an_average_of_16_bits_is_not_rounded_to_16_bits() -> None:
    """So differences that 16 bits cannot hold, or would round, do no harm."""
    w = Variable(np.float16([6e4, 1.0]))
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    w.assign(np.float16([-6e4, 1 - 2.0**-11]))
    average.apply([w])
    assert average.average(w).numpy().tolist() == [0, 1 - 2.0**-12]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("apply", np.float16),
        ("wrapper", ml_dtypes.bfloat16),
        ("function", np.float16),
        ("zero_debias", ml_dtypes.bfloat16),
    ],
)
def test_an_average_of_16_bits_goes_where_the_textbook_says(dtype: Any, kind: str) -> None:
    """In 16 bits it would stand still: a move is a 10,000th of what is left, or less."""
    decay, num_steps = 0.9999, 4000 if os.environ.get("GPUOPT_FULL") else 400
    w = Variable(np.full(3, 1, dtype), name="w")
    average = ExponentialMovingAverage(decay, zero_debias=kind == "zero_debias")
    source: Any = w

    def value() -> Any:
        return w.value()

    move = lambda: average.apply([source])  # noqa: E731
    if kind in ("function", "zero_debias"):
        source = value
    elif kind == "wrapper":
        optimizer = gpuopt.MovingAverageOptimizer(gpuopt.GradientDescentOptimizer(0.0), decay)
        average = optimizer.averages
        zero = np.zeros(3, dtype)
        move = lambda: optimizer.apply_gradients([(zero, w)])  # noqa: E731
    average.track([source])
    w.assign(np.full(3, 2, dtype))
    expected = 0.0 if source is value else 1.0
    for _ in range(num_steps):
        move()
        expected = decay * expected + (1 - decay) * 2
    if kind == "zero_debias":
        expected /= 1 - decay**num_steps
    found = average.average(source)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "zero_debias"), [(np.float16, False), (ml_dtypes.bfloat16, True)]
)
def test_averages_that_were_saved_in_16_bits_are_restored(
    dtype: Any, zero_debias: bool, tmp_path: Path
) -> None:
    """As earlier versions kept them, those of functions, too."""
    w = Variable(np.full(3, 1, dtype), name="w")

    def loss() -> Any:
        return w.value()

    average = ExponentialMovingAverage(0.5, zero_debias=zero_debias)
    average.track([w, loss])
    saved = [average.average(w), average.average(loss)]
    saved += [each for each in gpuopt.global_variables() if each.name.endswith("/biased")]
    earlier = {each.name: Variable(np.full(3, i + 0.5, dtype)) for i, each in enumerate(saved)}
    path = gpuopt.Saver(earlier, optimizers=[]).save(tmp_path / "model")
    gpuopt.Saver(saved, optimizers=[]).restore(path)
    assert len(saved) == 2 + zero_debias
    for i, each in enumerate(saved):
        assert each.numpy().tolist() == [i + 0.5] * 3


@pytest.mark.internal
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


@pytest.mark.internal
def test_an_exception_at_any_moment_leaves_numpys_warnings_as_they_were() -> None:
    w = Variable(np.ones(3), name="w")
    average = ExponentialMovingAverage(0.5)
    average.apply([w])
    with np.errstate(all="warn"):
        before = np.geterr()
        for interrupt in each_moment(least=20):
            with suppress(Interrupt), interrupt:
                average.apply([w])
            assert np.geterr() == before, interrupt.moment


@pytest.mark.internal
def test_ctrl_c_waits_until_all_averages_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    w, double = Variable(np.ones(3, np.float32)), Variable(np.ones(2))
    expected, averages = (ExponentialMovingAverage(0.5, zero_debias=True) for _ in range(2))
    move = AverageUpdates.move

    def function() -> Any:
        return 2 * w.numpy()

    def move_and_interrupt(*arguments: Any) -> None:
        move(*arguments)
        signal.raise_signal(signal.SIGINT)

    for value in (1.0, 5.0):
        w.assign(np.full(3, value))
        double.assign(np.full(2, value))
        expected.apply([w, double, function])
        with monkeypatch.context() as patch:
            patch.setattr(AverageUpdates, "move", move_and_interrupt)
            patch.setattr(signal, "raise_signal", raise_once(signal.raise_signal))
            with pytest.raises(KeyboardInterrupt):
                averages.apply([w, double, function])
    for each in (w, double, function):
        one, other = expected.average(each), averages.average(each)
        assert one is not None
        assert other is not None
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def raise_once(raise_signal: Any) -> Any:
    raised: list[int] = []

    def raise_if_first(number: int) -> None:
        if not raised:
            raised.append(number)
            raise_signal(number)

    return raise_if_first
