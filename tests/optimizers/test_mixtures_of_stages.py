"""Stages of a step do together what they do one by one: by numpy, around a plain optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from array_slots import array_slots
from dtypes import DTYPES
from each_device import variable_on
from pairs_of_stages import (
    AVERAGE_DECAY,
    DECAY,
    GROUP_RATE,
    MOST_NORM,
    MOST_VALUE,
    PAIRS,
    RATE,
    REFUSED,
    ROUNDING_SEED,
    SCALE,
    STAGES,
)

import gpuopt
from gpuopt import IndexedSlices, ParameterGroup, Variable
from gpuopt.backends import using
from gpuopt.backends.backend import compute_type
from gpuopt.backends.cpu.backend import CpuBackend
from gpuopt.backends.cpu.limits import CpuLimits
from gpuopt.device import Device
from gpuopt.rules.rounded import BFLOAT16, key_of_step, round_at_random
from gpuopt.rules.slot_codes import BLOCK, scales_shape
from gpuopt.state.slots import CodedSlot

# The types of variables for which a stage is there; none stands for all.
TYPES: dict[str, Sequence[Any]] = {
    "slot_bits": [np.float16, ml_dtypes.bfloat16, np.float32],
    "masters": [np.float16, ml_dtypes.bfloat16],
    "remainders": [ml_dtypes.bfloat16],
    "rounding": [ml_dtypes.bfloat16],
    "slot_dtype": [np.float16, ml_dtypes.bfloat16, np.float32],
}
FULL = bool(os.environ.get("GPUOPT_FULL"))
KINDS = ["dense", "sparse", "mixed"]
# Most stages of a mixture: with more, nearly all that go together would be in each.
MOST_STAGES = 6
SHAPES = [(3, 4), (70, 5), ()]
TABLE = (40, 12)
NUM_STEPS, BAD_STEP = 3, 1
# How many gradients are summed for an update, and the scale that grows after so many updates.
ACCUMULATED, GROWS_AFTER = 4, 2


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
    whole = inner
    if "loss_scale" in stages:
        whole = gpuopt.LossScaleOptimizer(whole, gpuopt.FixedLossScaleManager(SCALE))
    if "growing_scale" in stages:
        whole = gpuopt.LossScaleOptimizer(whole, gpuopt.DynamicLossScale(SCALE, GROWS_AFTER, 2.0))
    if "accumulation" in stages:
        whole = gpuopt.GradientAccumulationOptimizer(whole, ACCUMULATED)
    return whole, inner, averages


class OneByOne:
    """What each stage does, in numpy; the variables are arrays of the type that rules compute in.

    A plain optimizer gives Adam's step from 0: it does not depend on where the variable is.
    """

    def __init__(self, stages: Sequence[str], real: Any, shapes: Mapping[str, Any]) -> None:
        self._stages, self._real = stages, real
        self._good_steps = 0
        self._scale = SCALE if {"loss_scale", "growing_scale"} & set(stages) else 1.0
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

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return self._scale

    def skip(self) -> None:
        """Hears of a step that is not finite."""
        if "growing_scale" in self._stages:
            self._scale, self._good_steps = max(self._scale / 2, 1.0), 0

    def step(
        self, values: Mapping[str, Any], gradients: Sequence[Mapping[str, Any]]
    ) -> dict[str, np.ndarray]:
        """Returns the new values.

        Args:
            values: The old ones.
            gradients: Those that are accumulated: arrays, or rows with their numbers.
        """
        given = {name: self._mean([each[name] for each in gradients]) for name in gradients[0]}
        if "accumulation" not in self._stages:  # who accumulates gives unscaled gradients
            given = {n: (g / self._real(self._scale), rows) for n, (g, rows) in given.items()}
        if "clip_norm" in self._stages:
            squares = sum(np.sum(np.float64(g) ** 2) for g, _ in given.values())
            norm, most = self._real(np.sqrt(squares)), self._real(MOST_NORM)
            factor = most * min(1 / norm, 1 / most)
            given = {n: (g * factor, rows) for n, (g, rows) in given.items()}
        if "clip_value" in self._stages:
            given = {
                n: (np.clip(g, -MOST_VALUE, MOST_VALUE), rows) for n, (g, rows) in given.items()
            }
        updated = {name: self._updated(name, values[name], *given[name]) for name in given}
        self._good_steps += 1
        if "growing_scale" in self._stages and self._good_steps == GROWS_AFTER:
            self._scale, self._good_steps = self._scale * 2, 0
        return updated

    def _mean(self, gradients: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Returns the mean of gradients, with the sum of a sparse one's rows of equal numbers."""
        arrays, rows = zip(*gradients, strict=True)
        number = self._real(len(gradients))
        if rows[0] is None:
            total = arrays[0].astype(self._real)
            for each in arrays[1:]:
                total = total + each.astype(self._real)
            return total / number, None
        values, every = np.concatenate(arrays).astype(self._real), np.concatenate(rows)
        unique = np.unique(every)
        sums = [values[every == row].sum(axis=0) for row in unique]
        return np.stack(sums) / number, unique

    def _updated(self, name: str, value: Any, gradient: Any, rows: Any) -> np.ndarray:
        is_cautious = "cautious" in self._stages
        decays = ... if rows is None else rows
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
            decayed[decays] -= rate * decayed[decays]
        return np.asarray(decayed + step, self._real)


def check(stages: Sequence[str], kind: str, dtype: Any, xp: Any = np) -> None:
    """Compares each step with the same stages one by one, which begin at the same state.

    To the bit, but for what follows from norms and means: these are sums in an order of their own.
    """
    bound = 4 if {"clip_norm", "cautious"} & set(stages) else 0
    dtype = np.dtype(dtype)
    real: Any = compute_type(dtype)
    rng = np.random.default_rng(3)
    mine = _make_variables(kind, dtype, xp)
    optimizer, inner, averages = make(stages)
    theirs = OneByOne(stages, real, {name: each.shape for name, each in mine.items()})
    followed: dict[str, Any] = {}
    eps = float(ml_dtypes.finfo(dtype).eps)
    for number in range(NUM_STEPS):
        for variable in mine.values():  # small, so that steps lose few digits when they are added
            start = 0.02 * rng.normal(size=variable.shape)
            variable.assign(np.asarray(start).astype(dtype))
        before = {name: each.numpy().astype(real) for name, each in mine.items()}
        averages_before = dict(followed)
        rounds = ACCUMULATED if "accumulation" in stages else 1
        given = [_gradients(rng, mine, 7 * number + each) for each in range(rounds)]
        pairs_of_rounds = [_pairs(each, mine, xp) for each in given]
        if number == BAD_STEP and {"on_nonfinite", "loss_scale", "growing_scale"} & set(stages):
            good, last = pairs_of_rounds[-1].pop()
            pairs_of_rounds[-1].append((_spoiled(given[-1][last.name], last, kind, xp), last))
            _apply(optimizer, pairs_of_rounds, theirs.scale)
            theirs.skip()
            for name, variable in mine.items():
                np.testing.assert_array_equal(variable.numpy().astype(real), before[name])
            pairs_of_rounds[-1][-1] = good, last
        _apply(optimizer, pairs_of_rounds, theirs.scale)
        expected = theirs.step(before, given)
        if "growing_scale" in stages:
            scaling = getattr(optimizer, "_inner", None) if rounds > 1 else optimizer
            assert scaling.loss_scale == theirs.scale
        largest = max(np.abs(expected[name] - before[name]).max() for name in mine)
        for name, variable in mine.items():
            plain, zero = theirs.plain[name], theirs.zeros[name]
            plain_slots = {each: plain.get_slot(zero, each) for each in array_slots(plain)}
            new = [expected[name], *(each.numpy() for each in plain_slots.values())]
            stored = new[0].astype(dtype)
            if "remainders" in stages:
                stored = _upper_half(new[0])
            elif "rounding" in stages and (dtype == BFLOAT16 or "slot_dtype" in stages):
                rounded = _rounded_at_random(new, key_of_step(ROUNDING_SEED, number))
                # Codes are rounded to nearest.
                new = [rounded[0], *new[1:]] if "slot_bits" in stages else rounded
                stored = new[0] if dtype == BFLOAT16 else stored
            got = variable.numpy().astype(np.float64)
            error = np.abs(got - stored.astype(np.float64)).max()
            assert error <= bound * eps * largest, (name, number, error / (eps * largest))
            master = inner.get_slot(variable, "master")
            if master is not None:
                error = np.abs(master.numpy() - expected[name]).max()
                assert error <= bound * float(np.finfo(np.float32).eps) * largest, (name, number)
            if averages is not None:
                value = (variable if master is None else master).numpy().astype(real)
                follows = averages.average(variable)
                assert follows is not None
                was = averages_before.get(name)
                moved = value if was is None else was - (was - value) * real(1 - AVERAGE_DECAY)
                followed[name] = follows.numpy().astype(real)
                error = np.abs(followed[name] - moved).max()
                assert error <= bound * float(np.finfo(real).eps) * largest, (name, number, error)
            slots = {each: inner.get_slot(variable, each) for each in plain_slots}
            if inner.options.codecs.slot_dtype is not None:
                assert {each.dtype for each in slots.values()} == {BFLOAT16}
            _check_slots(slots, dict(zip(slots, new[1:], strict=True)), name, bound)
            for each, other in plain_slots.items():  # the next step begins alike
                other.assign(slots[each].numpy().astype(other.dtype))


def _make_variables(kind: str, dtype: Any, xp: Any) -> dict[str, Variable]:
    shapes = {} if kind == "sparse" else {f"w{i}": shape for i, shape in enumerate(SHAPES)}
    if kind != "dense":
        shapes["table"] = TABLE
    return {name: variable_on(xp, np.zeros(s, dtype), name=name) for name, s in shapes.items()}


def _rounded_at_random(arrays: Sequence[Any], key: Any) -> list[Any]:
    """Returns a variable and its slots in bfloat16."""
    numbers = np.arange(arrays[0].size, dtype=np.uint64)
    every = round_at_random([np.ravel(each) for each in arrays], numbers, key)
    return [new.reshape(arrays[0].shape) for new in every]


def _upper_half(masters: Any) -> Any:
    """Returns the bfloat16 next to each float32; of two, the one that is farther from 0."""
    bits = np.asarray(masters, np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits >> 16).astype(np.uint16).view(BFLOAT16)


def _check_slots(
    slots: Mapping[str, Any], expected: Mapping[str, Any], name: str, bound: float
) -> None:
    """Compares the slots of a variable with the numbers or bfloat16 that are expected.

    With a bound, those in fewer bits have the code that numpy gives, or, in a few places, the next
    one: what is computed in another order is another number by some of its last digits, and lies on
    the other side of what is between two codes at times.
    """
    for slot_name, value in expected.items():
        slot = slots[slot_name]
        got = slot.numpy()
        if isinstance(slot, CodedSlot):
            distance = np.abs(_codes_of(slot) - _codes_of(slot, value, bound))
        elif got.dtype.itemsize == 2:
            distance = np.abs(_ordered(got) - _ordered(value.astype(got.dtype)))
        else:
            most = bound * np.finfo(got.dtype).eps * np.abs(value).max()
            assert np.abs(got - value).max() <= most, (name, slot_name)
            continue
        assert distance.max() <= bool(bound), (name, slot_name, distance.max())
        assert distance.sum() <= 2 + 0.01 * distance.size, (name, slot_name, distance.sum())


def _ordered(numbers: Any) -> Any:
    """Numbers finite numbers of 16 bits in their order."""
    bits = np.asarray(numbers).view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def _codes_of(slot: CodedSlot, values: Any = None, bound: float = 0) -> Any:
    """Returns a slot's codes, or those that values get; they are in the order of what they mean."""
    codes, scales = slot.codes.numpy(), slot.scales.numpy()
    if values is not None:
        by_rows = scales.shape != scales_shape(codes.shape, BLOCK, by_rows=False)
        codes, expected = slot.codec.new_arrays(np.float32(values), by_rows=by_rows)
        np.testing.assert_allclose(scales, expected, rtol=bound * np.finfo(np.float32).eps)
    return codes.astype(np.int32)


def _gradients(rng: Any, variables: Mapping[str, Variable], seed: int) -> dict[str, Any]:
    """Returns each variable's gradient, in its type, and its row numbers, or None."""
    gradients: dict[str, Any] = {}
    for name, variable in variables.items():
        if name == "table":
            # Whole numbers, so that 16 bits hold their sums.
            values = rng.integers(-4, 5, (6, TABLE[1])).astype(variable.dtype)
            gradients[name] = values, np.array([4, 1, 4, 7, 1, 4 + seed])
        else:
            gradient = np.asarray(rng.normal(size=variable.shape)).astype(variable.dtype)
            gradients[name] = gradient, None
    return gradients


def _pairs(gradients: Mapping[str, Any], variables: Mapping[str, Variable], xp: Any) -> list[Any]:
    pairs: list[Any] = []
    for name, (array, rows) in gradients.items():
        gradient = xp.asarray(array)
        if rows is not None:
            gradient = IndexedSlices(gradient, xp.asarray(rows))
        pairs.append((gradient, variables[name]))
    return pairs


def _spoiled(gradient: tuple[Any, Any], variable: Variable, kind: str, xp: Any) -> Any:
    """Returns a gradient that is not finite: of some rows where all gradients are."""
    array, rows = gradient
    if kind != "sparse":
        return xp.asarray(np.full(variable.shape, np.nan, array.dtype))
    values = array.copy()
    values[-1, -1] = np.nan
    return IndexedSlices(xp.asarray(values), xp.asarray(rows))


def _apply(optimizer: Any, pairs_of_rounds: Sequence[Any], scale: float) -> None:
    is_scaled = isinstance(optimizer, gpuopt.LossScaleOptimizer)
    more = {"loss_scale": np.float32(scale)} if is_scaled else {}
    for pairs in pairs_of_rounds:
        optimizer.apply_gradients(pairs, **more)


def draw(seed: int) -> tuple[list[str], str, Any, Any]:
    """Draws stages that go together, a kind of step, a type, and a backend of the host."""
    rng = np.random.default_rng([seed])
    dtype = DTYPES[rng.integers(len(DTYPES))]
    stages: list[str] = []
    most = rng.integers(2, MOST_STAGES + 1)
    for stage in rng.permutation(list(STAGES)):
        goes = all(pair in PAIRS or pair[::-1] in PAIRS for pair in product(stages, [stage]))
        if goes and dtype in TYPES.get(stage, [dtype]) and len(stages) < most:
            stages.append(str(stage))
    large = int(rng.choice([1, 10**9]))
    backend = CpuBackend(CpuLimits(small_elements=1, large_elements=large))
    return stages, str(rng.choice(KINDS)), dtype, backend


def check_mixture(seed: int, xp: Any = np) -> None:
    stages, kind, dtype, backend = draw(seed)
    print(f"seed {seed}: {' + '.join(stages)}; {kind}, {np.dtype(dtype).name}")
    with using(Device.cpu, backend):
        check(stages, kind, dtype, xp)


@pytest.mark.parametrize("seed", range(1000 if FULL else 60))
def test_stages_are_the_same_one_by_one(seed: int) -> None:
    check_mixture(seed)


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("seed", range(200 if FULL else 10))
def test_stages_are_the_same_on_an_emulated_gpu(seed: int) -> None:
    check_mixture(seed, fake_cupy)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200 if FULL else 24))
def test_stages_are_the_same_on_a_gpu(seed: int) -> None:
    check_mixture(seed, pytest.importorskip("cupy"))


@pytest.mark.contract
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
    "growing_scale": (
        lambda bad: gpuopt.LossScaleOptimizer(
            gpuopt.AdamOptimizer(RATE), gpuopt.DynamicLossScale(bad)
        ),
        "initial_loss_scale must be",
    ),
    "growth": (
        lambda bad: gpuopt.LossScaleOptimizer(
            gpuopt.AdamOptimizer(RATE), gpuopt.DynamicLossScale(SCALE, 2, bad)
        ),
        "multiplier must be above 1",
    ),
    "masters": (lambda bad: gpuopt.AdamOptimizer(RATE, masters=bad), "masters must be"),
    "rounding": (
        lambda bad: gpuopt.AdamOptimizer(RATE, stochastic_rounding=bad),
        "stochastic_rounding must be",
    ),
    "slot_bits": (lambda bad: gpuopt.AdamOptimizer(RATE, slot_bits=bad), "slot_bits"),
    "catch_up": (lambda bad: gpuopt.AdamOptimizer(RATE, catch_up=bad), "catch_up"),
    "averages": (lambda bad: gpuopt.AdamOptimizer(RATE, averages=bad), "averages"),
    "on_nonfinite": (lambda bad: gpuopt.AdamOptimizer(RATE, on_nonfinite=bad), "on_nonfinite"),
}


@pytest.mark.contract
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


@pytest.mark.contract
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
