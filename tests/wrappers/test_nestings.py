"""Every wrapper in and around every other one: what numpy does one by one, or refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import Variable

pytestmark = pytest.mark.value

# Exact in binary, but for clipping.
RATE, MOMENTUM, AVERAGE_DECAY, MOST_NORM = 0.5, 0.5, 0.75, 3.0
ACCUMULATED, NUM_CALLS, BAD_CALL, IDLE_CALLS = 2, 8, 4, (2, 3)


class Nest:
    """Wrappers in wrappers around momentum, with two variables: "idle" has gradients of zero.

    Attributes:
        made: Each wrapper by its key; of two, the outer one.
    """

    def __init__(
        self, keys: Sequence[str], strategy: gpuopt.MirroredStrategy | None = None, **options: Any
    ) -> None:
        """Makes wrappers.

        Args:
            keys: Of `WRAPPERS`, from the outermost to the innermost.
            strategy: Whose two replicas make the calls, if any.
            options: Of the optimizer inside.
        """
        self.keys, self.strategy = keys, strategy
        self.getters = {key: GETTERS[key]() for key in keys if key in GETTERS}
        makers = [*self.getters.values(), *([] if strategy is None else [strategy])]
        make: Any = makers[0].variable if makers else Variable
        self.w = make(np.zeros(3, np.float32), name="w")
        self.idle = make(np.zeros(2, np.float32), name="idle")
        self.step = Variable(np.int64(0), name="step", trainable=False)
        self.inner = gpuopt.MomentumOptimizer(RATE, MOMENTUM, **options)
        self.whole: Any = self.inner
        self.made: dict[str, Any] = {}
        for key in reversed(keys):
            self.whole = self.made[key] = WRAPPERS[key](self.whole, self)

    def run(self, calls: Sequence[Sequence[tuple[Any, Variable]]]) -> None:
        """Makes calls, in the worker that there must be, and in two towers if there are any."""

        def make_calls(worker: Any = None) -> None:
            for pairs in calls:
                self._call(pairs)

        workers = [self.made[key] for key in ("sync", "stale") if key in self.made]
        if not workers:
            make_calls()
        elif "sync" in self.made:
            workers[0].run(make_calls, self.step, token_policy="per_step", timeout_s=10.0)
        else:
            workers[0].run(make_calls, self.step, num_workers=1, timeout_s=10.0)

    def _call(self, pairs: Sequence[tuple[Any, Variable]]) -> None:
        def apply_half(share: Any = None) -> None:  # as each tower, or replica, does
            halves = [((gradient / 2).astype(gradient.dtype), v) for gradient, v in pairs]
            self.whole.apply_gradients(halves, self.step)

        if self.strategy is not None:
            self.strategy.run(apply_half)
        elif "tower" in self.keys:
            gpuopt.replicate(apply_half, "weighted_sum", ["cpu", "cpu"])(np.ones(2, np.float32))
        else:
            self.whole.apply_gradients(list(pairs), self.step)

    def copies(self) -> list[list[Variable]]:
        """Returns "w" and "idle", of each replica."""
        if self.strategy is None:
            return [[self.w, self.idle]]
        return [list(each) for each in zip(self.w.replicas, self.idle.replicas, strict=True)]

    def written(self) -> list[Any]:
        """Returns all that a step may change."""
        state = self.inner.state_dict()
        slots = [value for by_name in state["slots"].values() for value in by_name.values()]
        variables = [each.numpy() for each in (self.w, self.idle, self.step)]
        return [*variables, *slots, *state["non_slots"].values()]


WRAPPERS: dict[str, Callable[[Any, Nest], Any]] = {
    "accumulation": lambda opt, _: gpuopt.GradientAccumulationOptimizer(opt, ACCUMULATED),
    "scale": lambda opt, _: gpuopt.LossScaleOptimizer(opt, gpuopt.DynamicLossScale(8.0, 2, 2.0)),
    "average": lambda opt, _: gpuopt.MovingAverageOptimizer(opt, AVERAGE_DECAY),
    "multitask": lambda opt, _: gpuopt.MultitaskOptimizerWrapper(opt),
    "clipping": lambda opt, nest: gpuopt.VariableClippingOptimizer(opt, {nest.w: [0]}, MOST_NORM),
    "tower": lambda opt, _: gpuopt.TowerOptimizer(opt),
    "sync": lambda opt, _: gpuopt.SyncReplicasOptimizer(opt, 1),
    "stale": lambda opt, nest: gpuopt.DropStaleGradientOptimizer(opt, 1000),
    "elastic": lambda opt, nest: gpuopt.ElasticAverageOptimizer(
        opt, 1, nest.getters["elastic"], 1000
    ),
    "model": lambda opt, nest: gpuopt.ModelAverageOptimizer(
        opt, 1, True, nest.getters["model"], 1000
    ),
    "agn": lambda opt, nest: gpuopt.AGNOptimizer(opt, 1, nest.getters["agn"], 1000),
}
GETTERS: dict[str, Callable[[], Any]] = {
    "elastic": gpuopt.ElasticAverageCustomGetter,
    "model": gpuopt.ModelAverageCustomGetter,
    "agn": gpuopt.AGNCustomGetter,
}
PERIODIC = list(GETTERS)
FOR_REPLICAS = ["accumulation", "scale", "average", "multitask", "clipping"]
FOR_WORKERS = ["accumulation", "sync", "stale", *PERIODIC]


def why_refused(keys: Sequence[str]) -> str | None:
    """Returns what the error says; None if wrappers go together."""
    for place in reversed(range(len(keys))):  # as they are made
        outer = keys[place]
        for inner in keys[place + 1 :]:
            if outer in FOR_WORKERS and inner in FOR_WORKERS:
                return "cannot be around .*: both decide when workers go on"
            if outer == "scale" and inner == "scale":
                return "a LossScaleOptimizer cannot be around another one"
            if outer == "scale" and inner in [*FOR_WORKERS, "tower"]:
                return r"LossScaleOptimizer cannot be around .*: write .*\(LossScaleOptimizer"
    if "tower" in keys:  # what is called in towers comes first
        for outer in keys[: keys.index("tower")]:
            if outer in ["stale", *PERIODIC]:
                return "cannot be used in a replica of a strategy, or in a tower"
            if outer in ["accumulation", "sync"]:
                return r"cannot be used in a tower: write TowerOptimizer\("
    around_scale = keys[: keys.index("scale")] if "scale" in keys else []
    if set(around_scale).intersection(PERIODIC):
        return "cannot be around LossScaleOptimizer: its workers meet"
    return None


def gradients_of(call: int, keys: Sequence[str]) -> list[np.ndarray]:
    rng = np.random.default_rng(call)
    w, idle = rng.integers(-4, 5, 3).astype(np.float32), np.float32([4, -2])
    if call == BAD_CALL and "scale" in keys:
        w[1] = np.nan
    return [w, np.zeros(2, np.float32) if call in IDLE_CALLS else idle]


class OneByOne:
    """What the wrappers do, in numpy, and in the order of `Nest`'s."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.values = [np.zeros(3), np.zeros(2)]
        self.momenta = [np.zeros(3), np.zeros(2)]
        # Of "w", by the wrapper's place.
        self.averages = {place: np.zeros(3) for place, key in enumerate(keys) if key == "average"}
        self.summed: list[Sequence[np.ndarray]] = []
        self.updates = 0
        self.scale, self.good_steps = 8.0, 0

    def call(self, gradients: Sequence[np.ndarray]) -> None:
        if "accumulation" not in self.keys:
            self._update(gradients)
            return
        self.summed.append(gradients)
        if len(self.summed) == ACCUMULATED:
            self._update([np.mean(each, axis=0) for each in zip(*self.summed, strict=True)])
            self.summed = []

    def _update(self, gradients: Sequence[np.ndarray]) -> None:
        if "scale" in self.keys:
            is_finite = bool(np.isfinite(np.concatenate(gradients)).all())
            self.good_steps = self.good_steps + 1 if is_finite else 0
            if not is_finite:
                self.scale /= 2
                return
            if self.good_steps == 2:
                self.scale, self.good_steps = self.scale * 2, 0
        self.updates += 1
        for place, gradient in enumerate(gradients):
            if "multitask" in self.keys and not gradient.any():
                continue
            self.momenta[place] = MOMENTUM * self.momenta[place] + gradient
            self.values[place] = self.values[place] - RATE * self.momenta[place]
        for place in reversed(range(len(self.keys))):  # from the innermost
            if self.keys[place] == "clipping":
                norm = np.linalg.norm(self.values[0])
                self.values[0] = self.values[0] * min(1.0, MOST_NORM / norm)
            if self.keys[place] == "average":
                moved = (1 - AVERAGE_DECAY) * (self.averages[place] - self.values[0])
                self.averages[place] = self.averages[place] - moved


def check(keys: Sequence[str], strategy: gpuopt.MirroredStrategy | None = None) -> None:
    reason = why_refused(keys)
    if reason is not None:
        check_refused(keys, reason)
        return
    nest, theirs = Nest(keys, strategy), OneByOne(keys)
    calls = [gradients_of(call, keys) for call in range(NUM_CALLS)]
    nest.run([list(zip(each, (nest.w, nest.idle), strict=True)) for each in calls])
    for gradients in calls:
        theirs.call(gradients)
    for copies in nest.copies():
        for variable, value, momentum in zip(copies, theirs.values, theirs.momenta, strict=True):
            slot = nest.inner.get_slot(variable, "momentum")
            assert slot is not None
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(slot.numpy(), momentum, rtol=1e-6, atol=1e-6)
        if theirs.averages:
            average = nest.made["average"].averages.average(copies[0])
            expected = theirs.averages[min(theirs.averages)]  # of the outermost
            np.testing.assert_allclose(average.numpy(), expected, rtol=1e-6, atol=1e-6)
    if "scale" in keys:
        assert nest.made["scale"].loss_scale == theirs.scale
    if not set(keys).intersection(PERIODIC):  # theirs counts meetings
        assert int(nest.step) == theirs.updates


def check_refused(keys: Sequence[str], reason: str) -> None:
    made: list[Nest] = []

    def make_and_run() -> None:
        nest = Nest(keys)
        made.append(nest)
        pairs = list(zip(gradients_of(0, keys), (nest.w, nest.idle), strict=True))
        nest.run([pairs] * ACCUMULATED)

    with pytest.raises((ValueError, RuntimeError), match=reason):
        make_and_run()
    for nest in made:
        written = nest.written()
        assert not np.any(np.concatenate([np.ravel(each) for each in written])), written


@pytest.mark.parametrize("outer", WRAPPERS)
def test_one_in_another_does_what_numpy_does_or_is_refused_by_name(outer: str) -> None:
    for inner in WRAPPERS:
        check([outer, inner])


def drawn(seed: int, wrappers: Sequence[str], least: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(wrappers, rng.integers(least, 5)).tolist() for _ in range(8)]


@pytest.mark.parametrize("seed", range(200 if os.environ.get("GPUOPT_FULL") else 10))
def test_several_in_each_other_do_what_numpy_does_or_are_refused_by_name(seed: int) -> None:
    # Of all alike, few would go together.
    for keys in drawn(seed, [*WRAPPERS, *FOR_REPLICAS], 3):
        check(keys)


# The columns of the guide's table, in their order.
COLUMNS = [
    ["accumulation"],
    ["scale"],
    ["average", "multitask", "clipping"],
    ["tower"],
    ["sync"],
    ["stale"],
    PERIODIC,
]


@pytest.mark.contract
def test_the_guide_says_which_go_together() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "workers_and_towers.md"
    section = page.read_text().split("## Wrappers around wrappers")[1]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "yes" in line]
    assert len(rows) == len(COLUMNS)
    for (_, *said), outers in zip(rows, COLUMNS, strict=True):
        for outer in outers:
            for word, inners in zip(said, COLUMNS, strict=True):
                for inner in inners:
                    goes = why_refused([outer, inner]) is None
                    assert word == ("yes" if goes else "no"), (outer, inner)


@pytest.mark.parametrize("seed", range(200 if os.environ.get("GPUOPT_FULL") else 4))
def test_replicas_do_the_same_together(seed: int) -> None:
    for keys in drawn(seed, FOR_REPLICAS, 2):
        check(keys, gpuopt.MirroredStrategy(["cpu", "cpu"]))


@pytest.mark.emulator
@pytest.mark.usefixtures("emulated_gpus")
@pytest.mark.parametrize("devices", [["gpu:0", "gpu:0"], ["gpu:0", "gpu:1"]], ids=str)
@pytest.mark.parametrize(
    "keys",
    [
        ["accumulation", "scale"],
        ["average", "accumulation"],
        ["clipping", "accumulation", "multitask", "scale"],
    ],
    ids="+".join,
)
def test_replicas_on_gpus_do_the_same_together(keys: Sequence[str], devices: list[str]) -> None:
    check(keys, gpuopt.MirroredStrategy(devices))


# What is wrong with a call, by the optimizer's options: a gradient, or a number.
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a variable of integers": ({}, 'Invalid type int32 for "integers"'),
    "a gradient of another shape": ({}, 'gradient for "w" has shape'),
    "a negative norm": ({"clip_norm": lambda: -1.0}, "clip_norm must be"),
    "a number of steps below 1": ({}, "accumulation_steps must be at least 1, got 0"),
}
TWO_OR_THREE = [
    keys
    for number in (2, 3)
    for keys in product(WRAPPERS, repeat=number)
    if {"accumulation", "scale"} <= set(keys) and why_refused(keys) is None
]
EACH_BAD = [(keys, [*BAD_CALLS][at % 4]) for at, keys in enumerate(TWO_OR_THREE)]


@pytest.mark.contract
@pytest.mark.parametrize(("keys", "bad"), EACH_BAD)
def test_what_is_wrong_with_a_call_is_refused_by_name_and_nothing_is_written(
    keys: Sequence[str], bad: str
) -> None:
    options, message = BAD_CALLS[bad]
    nest = Nest(keys, **options)
    [w, idle] = gradients_of(0, keys)
    pairs: list[Any] = [(w, nest.w), (idle, nest.idle)]
    if bad == "a variable of integers":
        integers = Variable(np.zeros(2, np.int32), name="integers")
        pairs.append((np.ones(2, np.int32), integers))
    elif bad == "a gradient of another shape":
        pairs[0] = w[:2], nest.w
    elif bad == "a number of steps below 1":
        nest.made["accumulation"].accumulation_steps = lambda: 0
    with pytest.raises((ValueError, TypeError), match=message):
        nest.run([pairs] * ACCUMULATED)
    assert not np.any(np.concatenate([np.ravel(each) for each in nest.written()]))
    assert nest.made["scale"].loss_scale == 8
    assert nest.made["scale"].num_skipped == 0
