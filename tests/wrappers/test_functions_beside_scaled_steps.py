"""Beside scaled steps on GPUs, what only Python knows is refused by name, or costs a wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import driver
import numpy as np
import pytest
from every_schedule_function import FORMULAS

import gpuopt
from gpuopt import (
    ExponentialMovingAverage,
    IndexedSlices,
    LossScaleOptimizer,
    ParameterGroup,
    Variable,
    backends,
)
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device

pytestmark = [pytest.mark.contract, pytest.mark.gpu]
GPU = Device("gpu", 0)


def decays(step: Any) -> Any:
    return gpuopt.exponential_decay(0.5, step, 3, 0.5)


def rate() -> float:
    return 0.5


def positive(array: Any) -> Any:
    return abs(array)


class Own(ExponentialMovingAverage):
    def decay_now(self, counter: Variable | None = None) -> Any:
        return np.float32(0.5)


def of_subclass(step: Variable) -> Any:
    found = decays(step)

    class Mine(type(found)):  # type: ignore[misc]
        pass

    return Mine(**{name: getattr(found, name) for name in found.__dataclass_fields__})


# Makes what momentum is given, by the global step; and what is said about it.
UNKNOWN: dict[str, tuple[Callable[[Variable], dict[str, Any]], str]] = {
    "function": (
        lambda step: {"learning_rate": rate},
        r'^"Momentum" of LossScaleOptimizer: learning_rate is the Python function rate\. .* gpu:0 '
        r".* a schedule of gpuopt .* LossScaleOptimizer\(\.\.\., host_may_wait=True\)",
    ),
    "function of a group": (
        lambda step: {"groups": [ParameterGroup("w", momentum=lambda: 0.5)]},
        'group "w": momentum is the Python function .*lambda',
    ),
    "subclass": (
        lambda step: {"learning_rate": of_subclass(step)},
        "learning_rate is a schedule of the subclass Mine",
    ),
    "variable": (
        lambda step: {"learning_rate": Variable(0.5, name="rate")},
        'learning_rate is the variable "rate"',
    ),
    "array": (lambda step: {"learning_rate": np.array(0.5)}, "learning_rate is an array"),
    "schedule of another counter": (
        lambda step: {"learning_rate": decays(Variable(0, name="another"))},
        'exponential_decay of "another", and global_step is "step"',
    ),
    "schedule that clips": (
        lambda step: {"clip_norm": decays(step)},
        "clip_norm is a schedule, exponential_decay",
    ),
    "constraint": (lambda step: {}, 'the constraint of "w" is the Python function positive'),
    "averages": (
        lambda step: {"averages": Own(0.5)},
        r"the decay of averages \(of Own\) follows from more",
    ),
    "averages by another counter": (
        lambda step: {"averages": ExponentialMovingAverage(0.5, Variable(3.0))},
        r"the decay of averages \(of ExponentialMovingAverage\)",
    ),
}


def scaled(name: str, step: Variable, **options: Any) -> LossScaleOptimizer:
    given = {"learning_rate": 0.5, "momentum": 0.5, **UNKNOWN[name][0](step)}
    return LossScaleOptimizer(
        gpuopt.MomentumOptimizer(**given), gpuopt.DynamicLossScale(8.0, 3), **options
    )


def variable(name: str, device: str = "gpu:0") -> Variable:
    constraint = positive if name == "constraint" else None
    return Variable(np.ones(5, np.float32), name="w", device=device, constraint=constraint)


def gradient(bad: bool = False, scale: float = 1.0) -> Any:
    xp: Any = pytest.importorskip("cupy")
    return xp.full(5, np.nan if bad else scale, np.float32)


def refuses(name: str) -> Any:
    return pytest.raises(ValueError, match=UNKNOWN[name][1])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_only_python_knows_is_refused_by_name_before_anything_is_written(name: str) -> None:
    step = Variable(0, name="step")
    optimizer, w = scaled(name, step), variable(name)
    xp: Any = pytest.importorskip("cupy")
    table = Variable(np.ones((4, 2), np.float32), name="table", device="gpu:0")
    slices = IndexedSlices(xp.ones((1, 2), np.float32), xp.asarray(np.int64([2])))
    for bad in (False, True):
        with refuses(name):
            optimizer.apply_gradients([(gradient(bad), w), (slices, table)], step)
    assert [each.numpy().tolist() for each in (w, table)] == [[1] * 5, [[1, 1]] * 4]
    assert (optimizer.get_slot(w, "momentum"), optimizer.variables()) == (None, [])
    counts = int(step), optimizer.loss_scale, optimizer.num_skipped, optimizer.last_nonfinite
    assert counts == (0, 8, 0, None)
    averages = UNKNOWN[name][0](step).get("averages")
    assert averages is None or averages.average(w) is None


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize("name", UNKNOWN)
def test_by_option_each_such_step_costs_one_wait(name: str, waits: list[str]) -> None:
    step = Variable(0, name="step")
    with driver.schedule("oldest"), backends.using(GPU, cuda_backend(GPU)):
        optimizer, w = scaled(name, step, host_may_wait=True), variable(name)
        for number in range(12):
            before, is_bad = len(waits), number % 4 == 1
            optimizer.apply_gradients([(gradient(is_bad), w)], step)
            # The first ones make averages, and wait for memory. Who skips a step names a gradient.
            assert number < 2 or len(waits) - before == (2 if is_bad else 1)
    assert (int(step), optimizer.num_skipped) == (9, 3)


def test_nothing_is_refused_where_nothing_waits() -> None:
    for name in UNKNOWN:
        step = Variable(0, name="step")
        optimizer, w = scaled(name, step), variable(name, "cpu")
        for bad in (False, True, False):
            optimizer.apply_gradients([(np.full(5, np.nan if bad else 1, np.float32), w)], step)
        assert (int(step), optimizer.num_skipped) == (2, 1), name
        del step, optimizer, w


def test_a_schedule_needs_the_steps_counter() -> None:
    step, w = Variable(0, name="step"), variable("w")
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(decays(step)), gpuopt.DynamicLossScale(8.0)
    )
    with pytest.raises(ValueError, match='exponential_decay of "step", and the step has none'):
        optimizer.apply_gradients([(gradient(), w)])
    assert w.numpy().tolist() == [1] * 5
    optimizer.apply_gradients([(gradient(), w)], step)
    assert w.numpy().tolist() == [0.5] * 5


def test_a_function_that_is_set_later_is_refused_until_a_number_is_set() -> None:
    step, w = Variable(0, name="step"), variable("w")
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(0.5), gpuopt.DynamicLossScale(8.0)
    )
    for given in (0.5, rate, 0.25):
        optimizer.hyperparameters["learning_rate"] = given
        for bad in (False, True):
            refused = pytest.raises(ValueError, match="is the Python function rate")
            with refused if given is rate else nullcontext():
                optimizer.apply_gradients([(gradient(bad), w)], step)
    assert w.numpy().tolist() == [1 - 0.5 - 0.25] * 5
    assert (int(step), optimizer.num_skipped) == (2, 2)


def test_the_option_is_true_or_false_and_is_shown() -> None:
    opt, manager = gpuopt.AdamOptimizer(), gpuopt.DynamicLossScale()
    for bad in (1, None, "yes", np.True_):
        with pytest.raises(TypeError, match="host_may_wait must be True or False, got"):
            LossScaleOptimizer(opt, manager, host_may_wait=bad)  # type: ignore[arg-type]
    shown = repr(LossScaleOptimizer(opt, manager, host_may_wait=True))
    assert "host_may_wait=True" in shown


def _accumulating(opt: Any) -> Any:
    return gpuopt.GradientAccumulationOptimizer(opt, 1)


def _averaging(opt: Any) -> Any:
    return gpuopt.MovingAverageOptimizer(opt, 0.5)


# What is around the scaling.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "accumulation": _accumulating,
    "average": _averaging,
    "multitask": gpuopt.MultitaskOptimizerWrapper,
    "sync": lambda opt: gpuopt.SyncReplicasOptimizer(opt, 1, 1),
    "tower": gpuopt.TowerOptimizer,
    "strategy": lambda opt: opt,
}


@pytest.mark.parametrize("may_wait", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpus(2)) if name == "strategy" else name
        for name in WRAPPERS
    ],
)
def test_wrappers_give_the_same_answer(name: str, may_wait: bool) -> None:
    xp: Any = pytest.importorskip("cupy")
    step = Variable(0, name="step")
    optimizer = scaled("function", step, host_may_wait=may_wait)
    whole = WRAPPERS[name](optimizer)
    made: Any = variable("w")
    if name == "strategy":
        strategy = gpuopt.MirroredStrategy(["gpu:0", "gpu:1"])
        made = strategy.variable(np.ones(5, np.float32), name="w")

    def train(factor: Any = None) -> Any:
        if name == "tower":
            whole.minimize(lambda: xp.sum(made.value() * factor[0]), step, [made])
            return factor[0]
        whole.apply_gradients([(xp.full(5, 0.5, np.float32), made)], step)
        return None

    def make_step() -> None:
        if name == "strategy":
            strategy.run(train)
        elif name == "tower":
            two = xp.asarray(np.float32([0.25, 0.25]))
            gpuopt.replicate(train, "weighted_sum", devices=["gpu:0", "gpu:0"])(two)
        else:
            train()

    if name == "sync":
        with whole.start(step, num_tokens=0), whole.worker(0) as worker:
            pairs = [(xp.full(5, 1.0, np.float32), made)]
            with nullcontext() if may_wait else refuses("function"):
                worker.apply_gradients(pairs, step)
    else:
        with nullcontext() if may_wait else refuses("function"):
            make_step()
    copies = made.replicas if name == "strategy" else [made]
    for each in copies:
        assert (each.numpy() < 1).all() if may_wait else (each.numpy() == 1).all()
    assert int(step) == (1 if may_wait else 0)


# Makes a schedule of a step counter: each of ours, and those that are made of others.
SCHEDULES: dict[str, Callable[[Variable], Any]] = {
    "exponential": decays,
    "exponential in stairs": lambda step: gpuopt.exponential_decay(0.5, step, 3, 0.5, True),
    "natural": lambda step: gpuopt.natural_exp_decay(0.5, step, 3, 0.5),
    "inverse time": lambda step: gpuopt.inverse_time_decay(0.5, step, 3, 0.5),
    "polynomial": lambda step: gpuopt.polynomial_decay(0.5, step, 5, 0.1, 2.0),
    "polynomial in cycles": lambda step: gpuopt.polynomial_decay(0.5, step, 2, 0.1, 1.0, True),
    "piecewise": lambda step: gpuopt.piecewise_constant(step, [1, 3, 5], [0.5, 0.25, 0.125, 0.1]),
    "cosine": lambda step: gpuopt.cosine_decay(0.5, step, 6, 0.1),
    "cosine with restarts": lambda step: gpuopt.cosine_decay_restarts(0.5, step, 2, 1.5, 0.5),
    "linear cosine": lambda step: gpuopt.linear_cosine_decay(0.5, step, 6),
    "noisy": lambda step: gpuopt.noisy_linear_cosine_decay(0.5, step, 6, seed=3),
    "warm-up": lambda step: gpuopt.linear_warmup(0.5, step, 3),
    "warm-up of polynomial": lambda step: gpuopt.linear_warmup(
        gpuopt.polynomial_decay(0.5, step, 4), step, 2
    ),
    "warm-up of noisy": lambda step: gpuopt.linear_warmup(
        gpuopt.noisy_linear_cosine_decay(0.5, step, 6), step, 2, 0.1
    ),
    "warm-up of piecewise": lambda step: gpuopt.linear_warmup(
        gpuopt.piecewise_constant(step, [1, 3], [0.5, 0.25, 0.125]), step, 2
    ),
    "one cycle": lambda step: gpuopt.one_cycle(0.5, step, 8),
    "warm-up, stable, decay": lambda step: gpuopt.warmup_stable_decay(0.5, step, 2, 2, 3),
}

# Makes an optimizer with schedules of a step counter in various places.
PLACES: dict[str, Callable[[Variable], Any]] = {
    **{
        name: lambda step, make=make: gpuopt.LazyAdamOptimizer(make(step))
        for name, make in SCHEDULES.items()
    },
    "groups": lambda step: gpuopt.LazyAdamOptimizer(
        decays(step),
        groups=[
            ParameterGroup("w", learning_rate=SCHEDULES["one cycle"](step)),
            ParameterGroup("table", beta1=SCHEDULES["piecewise"](step)),
        ],
    ),
    "decoupled decay": lambda step: gpuopt.AdamWOptimizer(
        SCHEDULES["cosine"](step), SCHEDULES["warm-up of polynomial"](step)
    ),
    "corrected bias": lambda step: gpuopt.NadamOptimizer(SCHEDULES["warm-up of polynomial"](step)),
    "LARS": lambda step: gpuopt.LARSOptimizer(SCHEDULES["warm-up of polynomial"](step)),
    "LARS's momentum": lambda step: gpuopt.LARSOptimizer(
        0.5, SCHEDULES["piecewise"](step), use_nesterov=True
    ),
    "PowerSign": lambda step: gpuopt.PowerSignOptimizer(SCHEDULES["cosine with restarts"](step)),
}


def test_the_table_has_every_schedule_there_is() -> None:
    step = Variable(0, name="step")
    assert {make(step).formula for make in SCHEDULES.values()} == FORMULAS


@pytest.mark.parametrize("place", PLACES)
def test_no_schedule_has_the_host_wait_and_all_count_the_steps_that_are_made(
    place: str, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    rng = np.random.default_rng(5)

    def given(number: int) -> tuple[Any, Any]:
        values = rng.normal(size=5).astype(np.float32)
        rows = rng.normal(size=(3, 4)).astype(np.float32)
        return values, IndexedSlices(xp.asarray(rows), xp.asarray(np.int64([1, 3, 1])))

    late = driver.schedule("oldest") if driver.is_here() else nullcontext()
    with late, backends.using(GPU, cuda_backend(GPU)):
        sides = []
        for _ in range(2):
            step = Variable(0, name="step")
            w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
            table = Variable(np.ones((6, 4), np.float32), name="table", device="gpu:0")
            sides.append((PLACES[place](step), step, w, table))
        optimizer = LossScaleOptimizer(sides[0][0], gpuopt.DynamicLossScale(8.0, 3))
        kept = []
        _, step, w, table = sides[0]
        for number in range(12):
            values, slices = given(number)
            is_bad = number % 4 in (1, 2)
            if is_bad:
                values[number % 5] = np.inf
            else:
                kept.append((xp.asarray(values), slices))
            before = len(waits)
            optimizer.apply_gradients([(xp.asarray(values), w), (slices, table)], step)
            # The first one waits for memory. At most 8 are outstanding.
            most = 1 if number >= 8 else 0
            assert number == 0 or len(waits) - before <= most or not driver.is_here()
        plain, their_step, their_w, their_table = sides[1]
        for values, slices in kept:
            plain.apply_gradients([(values, their_w), (slices, their_table)], their_step)
    assert (int(step), optimizer.num_skipped) == (int(their_step), 6) == (6, 6)
    np.testing.assert_array_equal(w.numpy(), their_w.numpy())
    np.testing.assert_array_equal(table.numpy(), their_table.numpy())
