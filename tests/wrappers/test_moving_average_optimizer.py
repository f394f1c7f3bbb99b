"""MovingAverageOptimizer, where the golden cases and the compositions do not cover it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from other_thread import repeated
from safetensors.numpy import load_file

import gpuopt
from gpuopt import IndexedSlices, MovingAverageOptimizer, Saver, Variable

pytestmark = pytest.mark.contract

ONES = np.ones(2, np.float32)


def sgd(**options: Any) -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0, **options)


def averaged(opt: gpuopt.Optimizer | None = None, **options: Any) -> MovingAverageOptimizer:
    return MovingAverageOptimizer(opt or sgd(), 0.5, **options)


def names() -> set[str]:
    return {variable.name for variable in gpuopt.global_variables()}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt": "Adam"}, TypeError, "must be an Optimizer, got 'Adam'"),
        ({"average_decay": "0.9"}, TypeError, "average_decay must be a number"),
        ({"average_decay": [0.9]}, TypeError, "average_decay must be a number"),
        ({"average_decay": 1.5}, ValueError, "average_decay must be from 0 to 1, got 1.5"),
        ({"average_decay": float("nan")}, ValueError, "average_decay must be from 0 to 1, got nan"),
        ({"num_updates": "many"}, TypeError, "num_updates must be a scalar number"),
        ({"num_updates": np.zeros(2)}, TypeError, "num_updates must be a scalar number"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MovingAverageOptimizer(**{"opt": sgd(), **arguments})
    assert not names()


def test_num_updates_has_counted_the_step() -> None:
    w, step = Variable([0.0, 0.0], name="w"), Variable(0, name="step")
    optimizer = MovingAverageOptimizer(sgd(), 0.9, num_updates=step)
    optimizer.apply_gradients([(ONES, w)], global_step=step)
    decay = (1 + 1) / (10 + 1)
    np.testing.assert_allclose(optimizer.averages.average(w), [decay - 1] * 2, rtol=1e-6)


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_step_that_is_not_made_neither_makes_nor_moves_an_average(policy: str) -> None:
    w = Variable([0.0, 0.0], name="w")
    optimizer = averaged(sgd(on_nonfinite=policy))

    def step(gradient: Any) -> None:
        if policy == "raise" and np.isnan(gradient).any():
            with pytest.raises(FloatingPointError):
                optimizer.apply_gradients([(gradient, w)])
        else:
            optimizer.apply_gradients([(gradient, w)])

    step(np.float32([np.nan, 1]))
    assert names() == {"w"}
    step(ONES)
    w.assign([7.0, 7.0])
    step(np.float32([np.nan, 1]))
    assert optimizer.averages.average(w).numpy().tolist() == [-0.5, -0.5]


def test_a_refused_call_makes_no_average() -> None:
    w, buffer = Variable([0.0, 0.0], name="w"), bytearray(8)
    raw = np.frombuffer(buffer, np.float32)
    optimizer = averaged(gpuopt.MomentumOptimizer(1.0, 0.9))
    with pytest.raises(ValueError, match='gradient for "w" has shape'):
        optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply_gradients([(None, w)])
    assert names() == {"w"}
    optimizer = averaged()
    with pytest.raises(ValueError, match="gpuopt cannot tell when that memory is freed"):
        optimizer.apply_gradients([(ONES, w), (ONES, raw)])
    assert names() == {"w"}
    assert (w.numpy().tolist(), raw.tolist()) == ([0, 0], [0, 0])


def test_an_error_in_the_middle_of_a_step_says_that_averages_are_missing() -> None:
    class Fails(gpuopt.GradientDescentOptimizer):
        def _finish(self, update_ops: list[Any], name_scope: str) -> None:
            raise OSError("of the user's")

    w, step = Variable([0.0, 0.0], name="w"), Variable(0, name="step")
    optimizer = averaged(Fails(1.0))
    with pytest.raises(OSError, match="of the user's") as raised:
        optimizer.apply_gradients([(ONES, w)], global_step=step)
    [note] = raised.value.__notes__
    assert 'Updated: "w". Done, in part, or not at all: moving averages. "step" was not' in note


def test_averages_of_another_optimizers_step_are_not_made() -> None:
    """Such a step may come in the middle, as from a signal handler."""
    w, other = Variable([0.0, 0.0], name="w"), Variable([0.0, 0.0], name="other")
    optimizer, others = averaged(), sgd()

    def gradients() -> Any:
        yield ONES, w
        others.apply_gradients([(ONES, other)])

    optimizer.apply_gradients(gradients())
    assert names() == {"w", "other", "w/ExponentialMovingAverage"}


def test_the_optimizer_inside_is_shown() -> None:
    w = Variable([1.0, 1.0], name="w")
    adam = gpuopt.AdamOptimizer(0.1)
    optimizer = averaged(adam)
    optimizer.minimize(lambda: (w * w).sum(), var_list=[w])
    assert optimizer.get_name() == "Adam"
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(w, "m") is adam.get_slot(w, "m")
    assert optimizer.variables() == adam.variables()
    assert optimizer.state_dict()["slots"].keys() == {"m", "v"}
    with pytest.warns(UserWarning, match="MovingAverageOptimizer overrides"):
        optimizer.minimize(lambda: (w * w).sum(), var_list=[w], gate_gradients=0)


# The swapping saver


def trained(opt: gpuopt.Optimizer | None = None) -> tuple[MovingAverageOptimizer, Variable]:
    w = Variable([0.0, 0.0], name="w")
    optimizer = averaged(opt)
    for _ in range(2):
        optimizer.apply_gradients([(ONES, w)])
    return optimizer, w


def test_there_is_no_swapping_saver_before_the_first_step() -> None:
    w, optimizer = Variable([0.0]), averaged()
    with pytest.raises(RuntimeError, match="Must call apply_gradients or minimize before"):
        optimizer.swapping_saver()
    optimizer.averages.track([w])
    optimizer.swapping_saver()


def test_a_variable_without_its_partner_is_refused() -> None:
    optimizer, w = trained()
    average = optimizer.averages.average(w)
    with pytest.raises(ValueError, match=r'"w" is to be saved, and its average "w/Expo.*" is n'):
        optimizer.swapping_saver([w])
    with pytest.raises(ValueError, match=r'the average "w/Expo.*" is to be saved, and its var'):
        optimizer.swapping_saver([average])
    other = Variable([1.0], name="other")
    optimizer.swapping_saver([other])
    optimizer.swapping_saver({"a": w, "b": average})


def test_values_are_swapped_and_slots_stay_under_their_variables_name(tmp_path: Path) -> None:
    optimizer, w = trained(gpuopt.AdamOptimizer(0.5))
    other = Variable([5.0], name="other")
    average, slot = optimizer.averages.average(w), optimizer.get_slot(w, "m")
    saved = load_file(optimizer.swapping_saver().save(tmp_path / "model"))
    assert set(saved) == {
        *("w", "w/ExponentialMovingAverage", other.name),
        *("w/Adam", "w/Adam_1", "beta1_power", "beta2_power"),
    }
    np.testing.assert_array_equal(saved["w"], average)
    np.testing.assert_array_equal(saved["w/ExponentialMovingAverage"], w)
    np.testing.assert_array_equal(saved["w/Adam"], slot)


def test_a_restore_by_the_swapping_saver_swaps_back(tmp_path: Path) -> None:
    optimizer, w = trained()
    average = optimizer.averages.average(w)
    saver = optimizer.swapping_saver(max_to_keep=2, name="any")
    path = saver.save(tmp_path / "model")
    before = w.numpy(), average.numpy()
    optimizer.apply_gradients([(ONES, w)])
    saver.restore(path)
    np.testing.assert_array_equal(w, before[0])
    np.testing.assert_array_equal(average, before[1])
    Saver().restore(path)  # a plain one takes averages for weights
    np.testing.assert_array_equal(w, before[1])
    np.testing.assert_array_equal(average, before[0])


def test_names_given_by_a_mapping_are_swapped_too(tmp_path: Path) -> None:
    raw = np.zeros(2, np.float32)
    optimizer = averaged()
    optimizer.apply_gradients([(ONES, raw)])
    average = optimizer.averages.average(raw)
    with pytest.raises(ValueError, match="its variable is not"):
        optimizer.swapping_saver()  # a raw array has no name
    saver = optimizer.swapping_saver({"x": raw, "x_average": average})
    path = saver.save(tmp_path / "model")
    saved = load_file(path)
    assert (saved["x"].tolist(), saved["x_average"].tolist()) == ([-0.5, -0.5], [-1, -1])
    raw[:] = 7
    saver.restore(path)
    assert (raw.tolist(), average.numpy().tolist()) == ([-1, -1], [-0.5, -0.5])


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_ended(tmp_path: Path) -> None:
    optimizer, w = trained(gpuopt.AdamOptimizer(0.5))
    path = optimizer.swapping_saver().save(tmp_path / "model")
    optimizer.apply_gradients([(2 * ONES, w)])
    expected = w.numpy(), optimizer.averages.average(w).numpy()
    del optimizer, w

    w = Variable([9.0, 9.0], name="w")
    optimizer = averaged(gpuopt.AdamOptimizer(0.5))
    optimizer.averages.track([w])
    optimizer.swapping_saver().restore(path)
    optimizer.apply_gradients([(2 * ONES, w)])
    np.testing.assert_array_equal(w, expected[0])
    np.testing.assert_array_equal(optimizer.averages.average(w), expected[1])


def test_values_that_wait_for_their_variables_are_swapped_when_attached(tmp_path: Path) -> None:
    optimizer, w = trained()
    average, lone = optimizer.averages.average(w), Variable([1.0], name="no partner")
    path = optimizer.swapping_saver([w, average, lone]).save(tmp_path / "model")
    expected = w.numpy(), average.numpy()
    del optimizer, w, average, lone
    anchor = Variable([1.0], name="anchor")
    optimizer = averaged()
    optimizer.averages.track([anchor])
    saver = optimizer.swapping_saver([anchor, optimizer.averages.average(anchor)])
    anchored = saver.save(tmp_path / "anchor")
    assert set(load_file(anchored)) == {"anchor", "anchor/ExponentialMovingAverage"}
    del saver, anchor
    w = Variable([9.0, 9.0], name="later")
    optimizer = averaged()
    optimizer.averages.track([w])
    average = optimizer.averages.average(w)
    saver = optimizer.swapping_saver([Variable([1.0], name="no partner")])
    saver.restore(path, deferred=True)
    with pytest.raises(ValueError, match='"w" is to be saved, and its average'):
        saver.attach({"w": w})
    saver.attach({"w": w, "w/ExponentialMovingAverage": average})
    np.testing.assert_array_equal(w, expected[0])
    np.testing.assert_array_equal(average, expected[1])


def test_a_save_holds_averages_and_weights_of_one_step(tmp_path: Path) -> None:
    w = Variable(np.zeros(2), name="w")
    step = Variable(0, name="step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.VariableClippingOptimizer(
        averaged(gpuopt.GradientDescentOptimizer(np.float64(1.0))), {w: [0]}, max_norm=1e6
    )
    averages = optimizer._inner.averages
    averages.track([w])
    with repeated(lambda: optimizer.apply_gradients([(-np.ones(2), w)], global_step=step)):
        saver = averaged(optimizer)._inner._inner.swapping_saver(max_to_keep=1)
        for number in range(30):
            saved = load_file(saver.save(tmp_path / "model", global_step=number))
            count = int(saved["step"])
            weight, average = saved["w/ExponentialMovingAverage"], saved["w"]
            assert weight.tolist() == [count] * 2
            # The average of n = 1, 2, ...: by the recurrence, n - 1 + 2 ** -n.
            np.testing.assert_allclose(average, count - 1 + 0.5**count, rtol=1e-12)
    assert count > 0


# On emulated GPUs


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
def test_averages_of_a_refused_step_start_anew() -> None:
    w = Variable(np.zeros((3, 2), np.float32), name="w", device="gpu:0")
    here = Variable(np.zeros(2, np.float32), name="here")
    rows = Variable([1, 3], dtype=np.int64, device="gpu:0").storage
    values = Variable(np.ones((2, 2), np.float32), device="gpu:0").storage
    optimizer = averaged()
    optimizer.apply_gradients([(IndexedSlices(values, rows), w), (ONES, here)])
    with pytest.raises(IndexError, match="row 3 is not in"):
        optimizer.check()
    assert optimizer.averages.average(w) is None
    # What is on another device was updated, and so was its average.
    assert optimizer.averages.average(here).numpy().tolist() == [-0.5, -0.5]
