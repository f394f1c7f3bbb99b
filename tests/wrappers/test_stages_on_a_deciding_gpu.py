"""Stages beside a scaled loss go by the count of the GPU that decides, and wait for nothing.

As averages, codes, rounded steps, rows that catch up, and accumulated gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import driver
import ml_dtypes
import numpy as np
import pytest
from gpu_streams import new_stream

import gpuopt
from gpuopt import (
    ExponentialMovingAverage,
    GradientAccumulationOptimizer,
    IndexedSlices,
    LossScaleOptimizer,
    Variable,
    backends,
)
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device

pytestmark = [pytest.mark.value, pytest.mark.gpu]

FLOAT, DOUBLE, HALF, BRAIN = (
    np.dtype(each) for each in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)
)


class Optimizing(NamedTuple):
    """An optimizer with the averages that it moves."""

    optimizer: Any
    averages: ExponentialMovingAverage | None


def with_averages(kind: Callable[..., Any], is_bounded: bool, **options: Any) -> Any:
    def make(step: Variable) -> Optimizing:
        averages = ExponentialMovingAverage(0.9, step if is_bounded else None)
        return Optimizing(kind(averages=averages, **options), averages)

    return make


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.5)


def alone(kind: Callable[..., Any], **options: Any) -> Any:
    return lambda step: Optimizing(kind(decays(step), **options), None)


ADAM: dict[str, Any] = {"learning_rate": 0.1}
# What is beside the scaling, and the dtype of variables.
STAGES: dict[str, tuple[Callable[[Variable], Optimizing], np.dtype[Any]]] = {
    "averages": (with_averages(gpuopt.LazyAdamOptimizer, False, **ADAM), FLOAT),
    "averages by the step": (with_averages(gpuopt.AdamOptimizer, True, **ADAM), FLOAT),
    "averages by the step, float64": (with_averages(gpuopt.AdamOptimizer, True, **ADAM), DOUBLE),
    "averages by the step, float16": (with_averages(gpuopt.AdamOptimizer, True, **ADAM), HALF),
    "averages and sums": (with_averages(gpuopt.LAMBOptimizer, True, clip_norm=1.0), FLOAT),
    "averages and sums of inputs": (
        with_averages(gpuopt.LARSOptimizer, True, clip_norm=1.0, **ADAM),
        FLOAT,
    ),
    "averages of masters": (
        with_averages(gpuopt.AdamOptimizer, True, masters="float32", **ADAM),
        HALF,
    ),
    "averages of remainders": (
        with_averages(gpuopt.AdamOptimizer, True, masters="remainder", **ADAM),
        BRAIN,
    ),
    "rounding": (alone(gpuopt.AdamOptimizer, stochastic_rounding=7), BRAIN),
    "rounding of rows": (alone(gpuopt.LazyAdamOptimizer, stochastic_rounding=7), BRAIN),
    "codes": (alone(gpuopt.LazyAdamOptimizer, slot_bits=8), FLOAT),
    "codes of all rows": (alone(gpuopt.AdamOptimizer, slot_bits=8), FLOAT),
    "codes of rows, clipped": (
        alone(gpuopt.LazyAdamOptimizer, slot_bits=8, clip_norm=0.5),
        BRAIN,
    ),
    "codes and averages": (
        with_averages(gpuopt.MomentumOptimizer, True, momentum=0.9, slot_bits=8, **ADAM),
        FLOAT,
    ),
    "codes and sums": (
        lambda step: Optimizing(gpuopt.TorchAdamWOptimizer(0.1, slot_bits=8, cautious=True), None),
        FLOAT,
    ),
    "rows that catch up": (alone(gpuopt.AdamOptimizer, catch_up=True), FLOAT),
    "rows that catch up by steps": (alone(gpuopt.AdamOptimizer, catch_up="stepping"), DOUBLE),
    "codes of rows that catch up": (alone(gpuopt.AdamOptimizer, catch_up=True, slot_bits=8), FLOAT),
    "rounded rows that catch up": (
        alone(gpuopt.AdamOptimizer, catch_up=True, stochastic_rounding=3),
        BRAIN,
    ),
    # Of both hyperparameters, a Python float would keep all digits.
    "decay": (
        lambda step: Optimizing(
            gpuopt.AdamWOptimizer(decays(step), decays(step), clip_norm=1.0), None
        ),
        FLOAT,
    ),
    "torch's decay": (alone(gpuopt.TorchAdamWOptimizer), DOUBLE),
    "sums": (lambda step: Optimizing(gpuopt.LAMBOptimizer(), None), FLOAT),
    "row-wise": (alone(gpuopt.RowWiseAdagradOptimizer), FLOAT),
    "averages of masters of rows": (
        with_averages(gpuopt.LazyAdamOptimizer, True, masters="float32", **ADAM),
        HALF,
    ),
}
# Beside accumulated gradients, too: of so many calls.
NUM_CALLS = 3
ACCUMULATED = ["decay", "torch's decay", "sums", "averages of masters of rows", "rounding"]
every_stage = pytest.mark.parametrize(
    "case",
    [*((stage, 1) for stage in STAGES), *((stage, NUM_CALLS) for stage in ACCUMULATED)],
    ids=lambda case: f"{case[0]} by {case[1]}",
)
# Rows without a gradient have another kernel, where a compiler that knows that their gradient is 0
# may round otherwise.
ROUNDED_OTHERWISE = {"codes of all rows"}


class DecidedByTheHost(gpuopt.DynamicLossScale):
    """What a user's own manager may do is not known, and so the host decides."""

    def get_loss_scale(self) -> Any:
        return super().get_loss_scale()


class Side:
    """A model whose steps are decided about by the GPU or by the host."""

    def __init__(
        self, stage: str, manager: type[gpuopt.DynamicLossScale], seed: int, num_calls: int
    ) -> None:
        rng = np.random.default_rng(seed)
        make, dtype = STAGES[stage]
        shapes = {"w0": (3, 4), "w1": (700,), "table": (6, 4)}
        self.variables = {
            name: Variable(rng.normal(size=shape).astype(dtype), name=name, device="gpu:0")
            for name, shape in shapes.items()
        }
        self.step = Variable(0, name="step", trainable=False)
        self.inner, self.averages = make(self.step)
        self.scaling = LossScaleOptimizer(self.inner, manager(4.0, 3, 2.5))
        self.optimizer: Any = self.scaling
        if num_calls > 1:
            self.optimizer = GradientAccumulationOptimizer(self.scaling, num_calls)

    def numbers(self) -> dict[str, Any]:
        self.inner.flush()
        found: dict[str, Any] = {"step": int(self.step), "scale": self.scaling.loss_scale}
        found.update(self.optimizer.state_dict()["non_slots"])
        for name, variable in self.variables.items():
            every = {"": variable}
            if self.averages is not None:
                every["average"] = self.averages.average(variable)
            for slot in self.optimizer.get_slot_names():
                every[slot] = self.optimizer.get_slot(variable, slot)
            for what, each in every.items():
                found[f"{name} {what}"] = None if each is None else each.numpy()
        return found


def numbers_of_updates(are_bad: list[bool], num_calls: int) -> tuple[int, int]:
    """Returns how many updates are left out, as one of their calls is bad, and made."""
    whole = len(are_bad) // num_calls
    left_out = sum(any(are_bad[at * num_calls : (at + 1) * num_calls]) for at in range(whole))
    return left_out, whole - left_out


def gradients(rng: np.random.Generator, side: Side, is_bad: bool) -> dict[str, Any]:
    chosen = ["w0", "w1", "table"][: rng.integers(1, 4)]
    given = {name: rng.normal(size=side.variables[name].shape) for name in chosen}
    if is_bad:
        bad = given[rng.choice(chosen)]
        bad[tuple(rng.integers(0, bad.shape))] = rng.choice([np.inf, -np.inf, np.nan])
    return {name: each.astype(side.variables[name].dtype) for name, each in given.items()}


POLICIES = ("newest", "random", "oldest")


@pytest.mark.parametrize("seed", range(3))
@every_stage
@pytest.mark.one_in(6)
def test_a_gpu_decides_what_the_host_would_to_the_bit(
    case: tuple[str, int], seed: int, decided: list[Any]
) -> None:
    stage, num_calls = case
    xp: Any = pytest.importorskip("cupy")
    rng = np.random.default_rng(seed)
    streams = [new_stream() for _ in range(3)]
    with driver.schedule(POLICIES[seed], seed) if driver.is_here() else nullcontext():
        sides = [
            Side(stage, kind, seed, num_calls)
            for kind in (gpuopt.DynamicLossScale, DecidedByTheHost)
        ]
        are_bad = (rng.random(24) < 0.4).tolist()
        if num_calls > 1:
            # In each call of an update, in all of them, and in none; the last call is of no update.
            are_bad = [call in {3, 10, 17, 24, 25, 26} for call in range(12 * num_calls + 1)]
        program = [
            (gradients(rng, sides[0], is_bad), rng.integers(0, 6, 6), streams[rng.integers(3)])
            for is_bad in are_bad
        ]
        # One after the other: where the host waits, it would learn of the other one's steps, too.
        for side in sides:
            for given, rows, stream in program:
                with stream:
                    pairs: list[Any] = [
                        (xp.asarray(each), side.variables[name]) for name, each in given.items()
                    ]
                    if "table" in given:
                        values, table = pairs.pop()
                        pairs.append((IndexedSlices(values, xp.asarray(rows)), table))
                    side.optimizer.apply_gradients(pairs, side.step, loss_scale=2.0)
        ours, theirs = (side.numbers() for side in sides)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            got = ours[name]
            if stage in ROUNDED_OTHERWISE and expected is not None:
                np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4, err_msg=name)
            else:
                assert np.array(got).tobytes() == np.array(expected).tobytes(), name
        numbers = [(side.scaling.num_skipped, int(side.step)) for side in sides]
        assert numbers == [numbers_of_updates(are_bad, num_calls)] * 2
    # The first ones make averages.
    assert len(decided) >= (13 if num_calls == 1 else 10)


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize("kind", ["dense", "mixed"])
@every_stage
@pytest.mark.one_in(3)
def test_the_host_waits_for_no_call_beside_any_stage(
    case: tuple[str, int], kind: str, waits: list[str]
) -> None:
    stage, num_calls = case
    xp: Any = pytest.importorskip("cupy")
    gpu = Device("gpu", 0)
    rng = np.random.default_rng(0)
    launches = []
    # With a backend that has seen no other stream, as other tests' has.
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        side = Side(stage, gpuopt.DynamicLossScale, 0, num_calls)
        are_bad = [call % 5 == 3 for call in range(12 * num_calls)]
        for call, is_bad in enumerate(are_bad):
            pairs: list[Any] = []
            for name, variable in side.variables.items():
                values = rng.normal(size=variable.shape).astype(variable.dtype)
                if name == "w1" and is_bad:
                    values[5] = np.nan
                pairs.append((xp.asarray(values), variable))
            values, table = pairs.pop()
            if kind == "mixed":
                values = IndexedSlices(values, xp.asarray(np.arange(6) % 4))
            if call % (8 * num_calls) == 7 * num_calls:
                driver.synchronize()  # the host is never more than 8 updates ahead
            before, waited = driver.counts().get("launches", 0), len(waits)
            side.optimizer.apply_gradients([*pairs, (values, table)], side.step)
            launches.append(driver.counts()["launches"] - before)
            # The first ones make averages, and wait for memory.
            assert call < 2 * num_calls or len(waits) == waited, call
        numbers = side.scaling.num_skipped, int(side.step)
        assert numbers == numbers_of_updates(are_bad, num_calls)
    if num_calls > 1 and kind == "dense":
        # The last gradients are added, and the sums measured; LAMB also sums over its update.
        in_update = 4 if stage == "sums" else 3
        assert launches[2 * num_calls :] == [*[1] * (num_calls - 1), in_update] * 10


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
def test_gradients_of_a_scaled_loss_are_accumulated_and_nobody_waits(waits: list[str]) -> None:
    xp: Any = pytest.importorskip("cupy")
    gpu = Device("gpu", 0)
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        side = Side("decay", gpuopt.DynamicLossScale, 0, NUM_CALLS)
        w = side.variables["w1"]
        factors = [xp.full(w.shape, each, np.float32) for each in (1, np.inf)]
        for call in range(8 * NUM_CALLS):
            factor, waited = factors[call % 7 == 6], len(waits)
            side.optimizer.minimize(lambda f=factor: xp.sum(w.value() * f), side.step, [w])
            assert call < 2 * NUM_CALLS or len(waits) == waited, call
        assert (side.scaling.num_skipped, int(side.step)) == (3, 5)


def test_averages_begin_at_the_first_step_that_is_made() -> None:
    xp: Any = pytest.importorskip("cupy")
    w = Variable(np.zeros(3, np.float32), name="w", device="gpu:0")
    averages = ExponentialMovingAverage(0.5)
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0, averages=averages), gpuopt.FixedLossScaleManager(2.0)
    )
    for bad in (True, True):
        optimizer.apply_gradients([(xp.full(3, np.nan if bad else 1, np.float32), w)])
        assert averages.average(w) is None
    for _ in range(2):
        optimizer.apply_gradients([(xp.ones(3, np.float32), w)])
    average = averages.average(w)
    assert average is not None
    assert average.numpy().tolist() == [-1.5] * 3


@pytest.mark.parametrize("bound", ["number", "array", "another variable", "a decay of its own"])
def test_averages_that_go_by_something_else_are_right(bound: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    w, other = Variable(np.zeros(3, np.float32), name="w", device="gpu:0"), Variable(0.0)

    class Own(ExponentialMovingAverage):
        def decay_now(self, counter: Variable | None = None) -> Any:
            return np.float32(1 + other.numpy()) / np.float32(10 + other.numpy())

    number = {"number": 3, "array": np.array(3.0), "another variable": other}
    averages = Own(0.9) if "own" in bound else ExponentialMovingAverage(0.9, number[bound])
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0, averages=averages),
        gpuopt.FixedLossScaleManager(2.0),
        host_may_wait=True,
    )
    values, expected = [], 0.0
    for count, bad in enumerate((False, False, True, False, False)):
        other.assign(count)
        optimizer.apply_gradients([(xp.full(3, np.nan if bad else 1, np.float32), w)])
        if not bad:
            values.append(-1.0 - len(values))
            decay = 4 / 13 if number.get(bound, other) is not other else (1 + count) / (10 + count)
            expected = values[-1] if len(values) == 1 else expected
            expected -= (expected - values[-1]) * (1 - decay)
    average = averages.average(w)
    assert average is not None
    np.testing.assert_allclose(average.numpy(), [expected] * 3, rtol=1e-6)


def test_steps_of_one_type_know_the_numbers_of_another() -> None:
    xp: Any = pytest.importorskip("cupy")
    step = Variable(0, name="step")
    variables = [Variable(np.zeros(3, real), device="gpu:0") for real in (FLOAT, DOUBLE)]
    rate = gpuopt.piecewise_constant(step, [1, 3], [1.0, 10.0, 100.0])
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(rate), gpuopt.FixedLossScaleManager(2.0)
    )
    for number, bad in enumerate((False, True, True, False, False, False)):
        variable = variables[number % 2]
        gradient = xp.full(3, np.inf if bad else 1, variable.dtype)
        optimizer.apply_gradients([(gradient, variable)], step)
    # By the rates of counts 0 and 2, and 1 and 3.
    assert variables[0].numpy().tolist() == [-1.0 - 10.0] * 3
    assert variables[1].numpy().tolist() == [-1.0 - 10.0] * 3
    assert int(step) == 4


def test_a_schedule_of_a_subclass_may_be_a_function_of_anything() -> None:
    xp: Any = pytest.importorskip("cupy")
    step, rates = Variable(0, name="step"), iter([1.0, 10.0, 100.0, 1000.0])
    found = gpuopt.exponential_decay(1.0, step, 3, 0.5)

    class Own(type(found)):  # type: ignore[misc]
        def __call__(self) -> Any:
            return np.float32(next(rates))

    own = Own(**{name: getattr(found, name) for name in found.__dataclass_fields__})
    w = Variable(np.zeros(3, np.float32), name="w", device="gpu:0")
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(own), gpuopt.FixedLossScaleManager(2.0), host_may_wait=True
    )
    for bad in (False, True, False):
        optimizer.apply_gradients([(xp.full(3, np.nan if bad else 1, np.float32), w)], step)
    assert w.numpy().tolist() == [-101.0] * 3
