"""Each two stages of a step do what they do one by one: by numpy, around a plain optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dtypes import DTYPES
from each_device import variable_on

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import using
from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device

# All of these are exact in binary, so that no digits are lost before a step begins.
RATE, GROUP_RATE, MOST_NORM, MOST_VALUE, DECAY, AVERAGE_DECAY, SCALE = (
    0.5,
    0.25,
    2.0,
    0.5,
    0.125,
    0.75,
    8.0,
)
# What each stage is asked for by.
STAGES: dict[str, dict[str, Any]] = {
    "clip_norm": {"clip_norm": MOST_NORM},
    "clip_value": {"clip_value": MOST_VALUE},
    "loss_scale": {},
    "cautious": {"cautious": True},
    "decay": {},
    "groups": {"groups": [ParameterGroup(r"w1|table", learning_rate=GROUP_RATE)]},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "averages": {},
    "slot_bits": {"slot_bits": 8},
    "catch_up": {"catch_up": "stepping"},
}
REFUSED = {
    ("clip_norm", "clip_value"): "cannot both clip",
    ("cautious", "catch_up"): "catch_up",
    ("loss_scale", "on_nonfinite"): "both decide",
    ("slot_bits", "catch_up"): "cannot be had with slot_bits=8",
}
PAIRS = [pair for pair in combinations(STAGES, 2) if pair not in REFUSED]
# Of these, what is compiled for other types than float32 is looked at, too.
COMPILED = [("clip_norm", "decay"), ("clip_norm", "averages"), ("loss_scale", "averages")]
# Those of the first ones have launches of their own on GPUs.
ON_GPUS = [
    *COMPILED,
    ("clip_value", "cautious"),
    ("clip_norm", "on_nonfinite"),
    ("groups", "on_nonfinite"),
    ("clip_norm", "catch_up"),
    ("clip_norm", "slot_bits"),
    ("cautious", "slot_bits"),
    ("groups", "slot_bits"),
    ("averages", "slot_bits"),
]
KINDS = ["dense", "sparse", "mixed"]
SHAPES = [(3, 4), (70, 5), ()]
TABLE = (40, 12)
NUM_STEPS, BAD_STEP = 3, 1


def make(stages: Sequence[str]) -> tuple[Any, Any, gpuopt.ExponentialMovingAverage | None]:
    """Returns an optimizer with stages, the one inside it, and the averages."""
    options = {key: value for stage in stages for key, value in STAGES[stage].items()}
    averages = None
    if "averages" in stages:
        averages = options["averages"] = gpuopt.ExponentialMovingAverage(AVERAGE_DECAY)
    inner: Any
    if "cautious" in stages:
        decay = DECAY if "decay" in stages else 0.0
        inner = gpuopt.TorchAdamWOptimizer(RATE, weight_decay=decay, **options)
    elif "decay" in stages:
        inner = gpuopt.AdamWOptimizer(DECAY, RATE, **options)
    else:
        inner = gpuopt.AdamOptimizer(RATE, **options)
    if "loss_scale" not in stages:
        return inner, inner, averages
    manager = gpuopt.FixedLossScaleManager(SCALE)
    return gpuopt.LossScaleOptimizer(inner, manager), inner, averages


class OneByOne:
    """What each stage does, in numpy; the variables are arrays of the type that rules compute in.

    A plain optimizer gives Adam's step from 0: it does not depend on where the variable is.
    """

    def __init__(self, stages: Sequence[str], real: Any, shapes: Mapping[str, Any]) -> None:
        self._stages, self._real = stages, real
        self.zeros = {name: Variable(np.zeros(s, real)) for name, s in shapes.items()}
        kind = gpuopt.AdamOptimizer
        arguments: dict[str, Any] = {}
        if "cautious" in stages:
            kind, arguments = gpuopt.TorchAdamWOptimizer, {"weight_decay": 0.0}
        is_grouped = "groups" in stages
        rates = {
            name: GROUP_RATE if is_grouped and name in ("w1", "table") else RATE for name in shapes
        }
        self.plain = {name: kind(rate, **arguments) for name, rate in rates.items()}

    def step(
        self, values: Mapping[str, Any], gradients: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Returns the new values. Gradients are arrays, or sums of rows with their numbers."""
        given = dict(gradients)
        if "loss_scale" in self._stages:
            given = {n: (g / self._real(SCALE), rows) for n, (g, rows) in given.items()}
        if "clip_norm" in self._stages:
            squares = sum(np.sum(np.float64(g) ** 2) for g, _ in given.values())
            norm, most = self._real(np.sqrt(squares)), self._real(MOST_NORM)
            factor = most * min(1 / norm, 1 / most)
            given = {n: (g * factor, rows) for n, (g, rows) in given.items()}
        if "clip_value" in self._stages:
            given = {
                n: (np.clip(g, -MOST_VALUE, MOST_VALUE), rows) for n, (g, rows) in given.items()
            }
        return {name: self._updated(name, values[name], *given[name]) for name in given}

    def _updated(self, name: str, value: Any, gradient: Any, rows: Any) -> np.ndarray:
        is_cautious = "cautious" in self._stages
        if rows is not None and is_cautious:  # its mean is over all rows
            every = np.zeros(value.shape, self._real)
            every[rows] = gradient
            gradient, rows = every, None
        zero = self.zeros[name]
        zero.assign(np.zeros(value.shape, self._real))
        passed = gradient if rows is None else IndexedSlices(gradient, rows)
        self.plain[name].apply_gradients([(passed, zero)])
        step = zero.numpy()
        if is_cautious:
            agrees = np.sign(step) * gradient < 0
            mean = np.maximum(self._real(agrees.mean()), self._real(1e-3))
            step = np.where(agrees, step / mean, 0)
        decayed = np.array(value)
        if "decay" in self._stages:
            rate = self._real(DECAY)
            if is_cautious:  # torch's, times the learning rate
                rate *= self._real(self.plain[name].hyperparameters["learning_rate"])
            at = ... if rows is None else rows
            decayed[at] -= rate * decayed[at]
        return np.asarray(decayed + step, self._real)


def check(stages: Sequence[str], kind: str, dtype: Any, xp: Any = np) -> None:
    """Compares each step with the same stages one by one, which begin at the same state."""
    dtype = np.dtype(dtype)
    real: Any = compute_type(dtype)
    rng = np.random.default_rng(3)
    shapes = {} if kind == "sparse" else {f"w{i}": shape for i, shape in enumerate(SHAPES)}
    if kind != "dense":
        shapes["table"] = TABLE
    mine = {name: variable_on(xp, np.zeros(s, dtype), name=name) for name, s in shapes.items()}
    optimizer, inner, averages = make(stages)
    theirs = OneByOne(stages, real, shapes)
    followed: dict[str, Any] = {}
    eps = float(ml_dtypes.finfo(dtype).eps)
    for number in range(NUM_STEPS):
        for variable in mine.values():  # small, so that steps lose few digits when they are added
            start = 0.02 * rng.normal(size=variable.shape)
            variable.assign(np.asarray(start).astype(dtype))
        before = {name: each.numpy().astype(real) for name, each in mine.items()}
        averages_before = dict(followed)
        pairs, summed = [], {}
        for name, variable in mine.items():
            if name == "table":
                rows = np.array([4, 1, 4, 7, 1, 4 + number])
                # Whole numbers, so that 16 bits hold their sums.
                values = rng.integers(-4, 5, (6, 12)).astype(dtype)
                unique = np.unique(rows)
                sums = [values[rows == row].astype(real).sum(axis=0) for row in unique]
                summed[name] = (np.stack(sums), unique)
                pairs.append((IndexedSlices(xp.asarray(values), xp.asarray(rows)), variable))
            else:
                gradient = np.asarray(rng.normal(size=variable.shape)).astype(dtype)
                summed[name] = (gradient.astype(real), None)
                pairs.append((xp.asarray(gradient), variable))
        if number == BAD_STEP and {"on_nonfinite", "loss_scale"} & set(stages):
            given, last = pairs.pop()
            bad = xp.asarray(np.full(TABLE if kind != "dense" else last.shape, np.nan, dtype))
            pairs.append((bad, last))
            _apply(optimizer, pairs)
            for name, variable in mine.items():
                np.testing.assert_array_equal(variable.numpy().astype(real), before[name])
            pairs[-1] = given, last
        _apply(optimizer, pairs)
        expected = theirs.step(before, summed)
        largest = max(np.abs(expected[name] - before[name]).max() for name in mine)
        for name, variable in mine.items():
            got = variable.numpy().astype(np.float64)
            error = np.abs(got - expected[name].astype(dtype).astype(np.float64)).max()
            assert error <= 4 * eps * largest, (name, number, error / (eps * largest))
            if averages is not None:
                value = variable.numpy().astype(real)
                follows = averages.average(variable)
                assert follows is not None
                was = averages_before.get(name)
                moved = value if was is None else was - (was - value) * real(1 - AVERAGE_DECAY)
                followed[name] = follows.numpy().astype(real)
                error = np.abs(followed[name] - moved.astype(dtype).astype(real)).max()
                assert error <= 4 * eps * largest, (name, number, error / (eps * largest))
            for slot_name in theirs.plain[name].get_slot_names():
                slot = inner.get_slot(variable, slot_name)
                other = theirs.plain[name].get_slot(theirs.zeros[name], slot_name)
                # From here on, both have the same, also where it is stored in fewer bits.
                other.assign(slot.numpy().astype(real))


def _apply(optimizer: Any, pairs: Any) -> None:
    is_scaled = isinstance(optimizer, gpuopt.LossScaleOptimizer)
    optimizer.apply_gradients(pairs, **({"loss_scale": np.float32(SCALE)} if is_scaled else {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", PAIRS, ids="+".join)
def test_two_stages_are_the_same_one_by_one(
    stages: Sequence[str], kind: str, every_form_one_by_one: str
) -> None:
    check(stages, kind, np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != np.float32], ids=str)
@pytest.mark.parametrize("stages", PAIRS, ids="+".join)
def test_two_stages_of_other_types_are_the_same_one_by_one(
    stages: Sequence[str], dtype: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == np.float64 and "slot_bits" in stages:
        pytest.skip("slots in 8 bits are of float32 and less")
    large = 1 if stages in COMPILED else 10**9
    with using(Device.cpu, CpuBackend(CpuLimits(small_elements=1, large_elements=large))):
        check(stages, kind, dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", ON_GPUS, ids="+".join)
def test_two_stages_are_the_same_on_a_gpu(
    stages: Sequence[str], kind: str, dtype: Any, xp: Any
) -> None:
    check(stages, kind, dtype, xp)


@pytest.mark.parametrize("stages", REFUSED, ids="+".join)
def test_stages_that_contradict_each_other_are_refused_by_name(stages: tuple[str, str]) -> None:
    with pytest.raises((TypeError, ValueError), match=REFUSED[stages]):
        make(stages)


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "clip_norm": (lambda bad: gpuopt.AdamOptimizer(RATE, clip_norm=bad), "clip_norm must be"),
    "clip_value": (lambda bad: gpuopt.AdamOptimizer(RATE, clip_value=bad), "clip_value must be"),
    "groups": (
        lambda bad: gpuopt.AdamOptimizer(RATE, groups=[ParameterGroup("w", clip_norm=bad)]),
        'group "w": clip_norm must be',
    ),
    "clip_norm of a function": (
        lambda bad: gpuopt.AdamOptimizer(RATE, clip_norm=lambda: bad),
        "clip_norm must be",
    ),
    "loss_scale": (
        lambda bad: gpuopt.LossScaleOptimizer(
            gpuopt.AdamOptimizer(RATE), gpuopt.FixedLossScaleManager(bad)
        ),
        "loss_scale",
    ),
    "accumulation": (
        lambda bad: gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(RATE), bad),
        "accumulation_steps",
    ),
    "slot_bits": (lambda bad: gpuopt.AdamOptimizer(RATE, slot_bits=bad), "slot_bits"),
    "catch_up": (lambda bad: gpuopt.AdamOptimizer(RATE, catch_up=bad), "catch_up"),
    "averages": (lambda bad: gpuopt.AdamOptimizer(RATE, averages=bad), "averages"),
    "on_nonfinite": (lambda bad: gpuopt.AdamOptimizer(RATE, on_nonfinite=bad), "on_nonfinite"),
}


@pytest.mark.parametrize("bad", [-1.0, np.nan])
@pytest.mark.parametrize("stage", BAD_VALUES)
def test_bad_values_are_refused_by_name_and_nothing_is_written(stage: str, bad: float) -> None:
    build, message = BAD_VALUES[stage]
    w, counter = Variable(np.ones(3, np.float32), name="w"), Variable(0, name="counter")
    made: list[Any] = []

    def step() -> None:
        made.append(build(bad))
        made[0].apply_gradients([(np.ones(3, np.float32), w)], global_step=counter)

    with pytest.raises((TypeError, ValueError), match=message):
        step()
    assert w.numpy().tolist() == [1, 1, 1]
    assert int(counter) == 0
    assert not [variable for optimizer in made for variable in optimizer.variables()]


@pytest.mark.parametrize("stages", [(each,) for each in STAGES], ids="+".join)
def test_a_variable_of_integers_is_refused_by_every_stage(stages: Sequence[str]) -> None:
    w, fine = Variable(np.ones(3, np.int32), name="integers"), Variable(np.ones(3, np.float32))
    table = Variable(np.ones(3, np.float32), name="w1 of table")
    optimizer, inner, averages = make(stages)
    one = np.ones(3, np.float32)
    with pytest.raises(ValueError, match='Invalid type int32 for "integers"'):
        optimizer.apply_gradients([(one, fine), (one, table), (np.ones(3, np.int32), w)])
    assert fine.numpy().tolist() == table.numpy().tolist() == w.numpy().tolist() == [1, 1, 1]
    assert not inner.variables()
    assert averages is None or averages.average(fine) is None
