"""Every argument of the stages of a step refuses what it cannot be, by name, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import (
    DynamicLossScale,
    ExponentialMovingAverage,
    ExponentialUpdateLossScaleManager,
    FixedLossScaleManager,
    GradientAccumulationOptimizer,
    LossScaleOptimizer,
    MovingAverageOptimizer,
    ParameterGroup,
    Variable,
)

pytestmark = pytest.mark.contract

RATE = 0.5
BAD: dict[str, Any] = {
    "negative": -1.0,
    "negative whole": -1,
    "zero": 0,
    "NaN": np.nan,
    "infinity": np.inf,
    "less than any": -np.inf,
    "True": True,
    "numpy's True": np.True_,
    "text": "1",
    "bytes": b"1",
    "numpy's NaN": np.float32(np.nan),
    "array": np.array(2.0),
    "array of one": np.array([2.0]),
    "array of two": np.ones(2),
    "list": [2.0],
    "dict": {},
    "None": None,
    "object": object(),
    "complex": 2j,
    "complex array": np.array(2j),
    "scalar of float16": np.float16(-1),
    "scalar of int": np.int8(-1),
}
NUMBERS = {"array", "infinity", "zero"}


def adam(**options: Any) -> Any:
    return gpuopt.AdamOptimizer(RATE, **options)


def scaled(manager: Any, **options: Any) -> Any:
    return LossScaleOptimizer(adam(), manager, **options)


# Makes an optimizer with a bad value, says its name, and which values are none of the bad ones.
ARGUMENTS: dict[str, tuple[Callable[[Any], Any], str, set[str]]] = {
    "clip_norm": (lambda bad: adam(clip_norm=bad), "clip_norm must be", {*NUMBERS, "None"}),
    "clip_value": (lambda bad: adam(clip_value=bad), "clip_value must be", {*NUMBERS, "None"}),
    "clip_norm of a group": (
        lambda bad: adam(groups=[ParameterGroup("w", clip_norm=bad)]),
        'group "w": clip_norm must be',
        {*NUMBERS, "None"},
    ),
    "clip_form": (lambda bad: adam(clip_norm=1.0, clip_form=bad), "clip_form must be", set()),
    "on_nonfinite": (lambda bad: adam(on_nonfinite=bad), "on_nonfinite must be", set()),
    "masters": (lambda bad: adam(masters=bad), "masters must be", {"None"}),
    "slot_bits": (lambda bad: adam(slot_bits=bad), "slot_bits must be", set()),
    "slot_form": (lambda bad: adam(slot_bits=8, slot_form=bad), "slot_form must be", set()),
    "slot_dtype": (lambda bad: adam(slot_dtype=bad), "slot_dtype must be", {"None"}),
    "stochastic_rounding": (
        lambda bad: adam(stochastic_rounding=bad),
        "stochastic_rounding must be a seed",
        {"zero", "None"},
    ),
    "catch_up": (lambda bad: adam(catch_up=bad), "catch_up must be", {"True"}),
    "cautious": (
        lambda bad: gpuopt.TorchAdamWOptimizer(RATE, cautious=bad),
        "cautious must be",
        {"True"},
    ),
    "averages": (lambda bad: adam(averages=bad), "averages must be", {"None"}),
    "decay": (
        lambda bad: adam(averages=ExponentialMovingAverage(bad)),
        "decay must be",
        {"zero"},
    ),
    "num_updates": (
        lambda bad: adam(averages=ExponentialMovingAverage(0.5, bad)),
        "num_updates must be",
        {"zero", "array", "None"},
    ),
    "zero_debias": (
        lambda bad: adam(averages=ExponentialMovingAverage(0.5, zero_debias=bad)),
        "zero_debias must be",
        {"True"},
    ),
    "average_decay": (
        lambda bad: MovingAverageOptimizer(adam(), bad),
        "average_decay must be",
        {"zero"},
    ),
    "loss_scale": (lambda bad: scaled(FixedLossScaleManager(bad)), "loss_scale must be", set()),
    "initial_loss_scale": (
        lambda bad: scaled(DynamicLossScale(bad)),
        "initial_loss_scale must be",
        set(),
    ),
    "increment_period": (
        lambda bad: scaled(DynamicLossScale(8.0, bad)),
        "increment_period must be",
        set(),
    ),
    "multiplier": (
        lambda bad: scaled(DynamicLossScale(8.0, 3, bad)),
        "multiplier must be",
        set(),
    ),
    "init_loss_scale": (
        lambda bad: scaled(ExponentialUpdateLossScaleManager(bad, 3)),
        "init_loss_scale must be",
        set(),
    ),
    "incr_every_n_steps": (
        lambda bad: scaled(ExponentialUpdateLossScaleManager(8.0, bad)),
        "incr_every_n_steps must be",
        set(),
    ),
    "decr_every_n_nan_or_inf": (
        lambda bad: scaled(ExponentialUpdateLossScaleManager(8.0, 3, bad)),
        "decr_every_n_nan_or_inf must be",
        set(),
    ),
    "incr_ratio": (
        lambda bad: scaled(ExponentialUpdateLossScaleManager(8.0, 3, 2, bad)),
        "incr_ratio must be",
        set(),
    ),
    "decr_ratio": (
        lambda bad: scaled(ExponentialUpdateLossScaleManager(8.0, 3, 2, 2.0, bad)),
        "decr_ratio must be",
        set(),
    ),
    "loss_scale_manager": (scaled, "loss_scale_manager must be", set()),
    "accept_after": (
        lambda bad: scaled(DynamicLossScale(), accept_after=bad),
        "accept_after must",
        {"None"},
    ),
    "host_may_wait": (
        lambda bad: scaled(DynamicLossScale(), host_may_wait=bad),
        "host_may_wait must be",
        {"True"},
    ),
    "accumulation_steps": (
        lambda bad: GradientAccumulationOptimizer(adam(), bad),
        "accumulation_steps must be",
        set(),
    ),
    "most_rows": (
        lambda bad: GradientAccumulationOptimizer(adam(), 2, most_rows=bad),
        "most_rows must be",
        set(),
    ),
    "reduction": (
        lambda bad: GradientAccumulationOptimizer(adam(), 2, reduction=bad),
        "reduction must be",
        set(),
    ),
    "opt": (lambda bad: LossScaleOptimizer(bad, DynamicLossScale()), "must be an Opt", set()),
}


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.one_in(3)
def test_a_bad_value_is_refused_by_name(argument: str, value: str) -> None:
    make, message, are_good = ARGUMENTS[argument]
    w, step = Variable(np.ones(3, np.float32), name="w"), Variable(0, name="step")
    if value in are_good:
        make(BAD[value]).apply_gradients([(np.ones(3, np.float32), w)], step)
        return
    with pytest.raises((TypeError, ValueError), match=message):
        make(BAD[value]).apply_gradients([(np.ones(3, np.float32), w)], step)
    assert w.numpy().tolist() == [1, 1, 1]
    assert int(step) == 0


@pytest.mark.parametrize("value", [each for each in BAD if each not in ("None", "array")])
def test_gradients_are_divided_by_no_bad_scale(value: str) -> None:
    w, step = Variable(np.ones(3, np.float32), name="w"), Variable(0, name="step")
    optimizer = scaled(DynamicLossScale(8.0))
    for scale in (BAD[value], 0.5, np.array(np.nan)):
        with pytest.raises((TypeError, ValueError), match="loss_scale must be"):
            optimizer.apply_gradients([(np.ones(3, np.float32), w)], step, loss_scale=scale)
    assert w.numpy().tolist() == [1, 1, 1]
    assert (int(step), optimizer.variables(), optimizer.num_skipped) == (0, [], 0)


def test_a_decay_that_was_assigned_later_is_refused_before_anything_is_written() -> None:
    w, decay = Variable(np.ones(3, np.float32), name="w"), Variable(0.5, name="decay")
    averages = ExponentialMovingAverage(decay)  # type: ignore[arg-type]
    optimizer = adam(averages=averages)
    optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    before = w.numpy()
    decay.assign(1.5)
    with pytest.raises(ValueError, match="decay must be from 0 to 1, got"):
        optimizer.apply_gradients([(np.ones(3, np.float32), w)])
    np.testing.assert_array_equal(w.numpy(), before)


# Makes an optimizer for variables of any type.
STAGES: dict[str, Callable[[], Any]] = {
    "plain": adam,
    "clip_norm": lambda: adam(clip_norm=1.0),
    "clip_value": lambda: adam(clip_value=1.0),
    "on_nonfinite": lambda: adam(on_nonfinite="skip"),
    "averages": lambda: adam(averages=ExponentialMovingAverage(0.5)),
    "slot_bits": lambda: adam(slot_bits=8),
    "slot_dtype": lambda: adam(slot_dtype="bfloat16"),
    "masters": lambda: adam(masters="float32"),
    "remainders": lambda: adam(masters="remainder"),
    "rounding": lambda: adam(stochastic_rounding=7),
    "catch_up": lambda: adam(catch_up=True),
    "loss scale": lambda: scaled(DynamicLossScale(8.0)),
    "accumulation": lambda: GradientAccumulationOptimizer(adam(), 2),
    "moving average": lambda: MovingAverageOptimizer(adam(), 0.5),
}


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_, np.complex64])
@pytest.mark.parametrize("stage", STAGES)
def test_variables_that_are_no_floats_are_refused_by_name(stage: str, dtype: Any) -> None:
    fine = Variable(np.ones(3, np.float32), name="fine")
    optimizer, step = STAGES[stage](), Variable(0, name="step")

    def make_step() -> None:
        other = Variable(np.ones(3, dtype), name="other")
        pairs = [(np.ones(3, np.float32), fine), (np.ones(3, dtype), other)]
        optimizer.apply_gradients(pairs, step)

    with pytest.raises((TypeError, ValueError), match="other"):
        make_step()
    assert fine.numpy().tolist() == [1, 1, 1]
    assert (int(step), optimizer.variables()) == (0, [])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_variables_of_no_elements_change_nothing_for_others(stage: str, shape: Any) -> None:
    dtype = ml_dtypes.bfloat16 if stage == "remainders" else np.float32
    results = []
    for beside in (False, True):
        w, step = Variable(np.ones(3, dtype), name="w"), Variable(0, name="step")
        optimizer = STAGES[stage]()
        pairs: list[Any] = [(np.ones(3, dtype), w)]
        if beside:
            empty = Variable(np.ones(shape, dtype), name="empty")
            pairs.insert(0, (np.ones(shape, dtype), empty))
            optimizer.apply_gradients(pairs[:1], step)  # alone
            optimizer, step = STAGES[stage](), Variable(0, name="step")
        for _ in range(4):
            optimizer.apply_gradients(pairs, step)
        results.append([w.numpy().tolist(), int(step)])
    assert results[0] == results[1]
    assert results[0][0] != [1, 1, 1]
