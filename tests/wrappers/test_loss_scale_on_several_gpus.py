"""One of several GPUs decides whether a step with a scaled loss is made, and tells the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import driver
import numpy as np
import pytest
from gpu_streams import new_stream

import gpuopt
from gpuopt import IndexedSlices, LossScaleOptimizer, ParameterGroup, Variable, backends
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device
from gpuopt.distributed import PerReplica

pytestmark = [pytest.mark.value, pytest.mark.gpu]
several_gpus = pytest.mark.parametrize(
    "num_gpus", [pytest.param(number, marks=pytest.mark.gpus(number)) for number in (2, 3)]
)


class OwnManager(gpuopt.ExponentialUpdateLossScaleManager):
    """With it, the host decides."""

    def get_loss_scale(self) -> Any:
        return super().get_loss_scale()


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.5)


# Makes an optimizer that follows a global step.
OPTIMIZERS: dict[str, Callable[[Variable], Any]] = {
    "Adam": lambda step: gpuopt.AdamOptimizer(0.1),
    "clipped NAdam": lambda step: gpuopt.NadamOptimizer(decays(step), clip_norm=0.5),
    "LazyAdam in groups": lambda step: gpuopt.LazyAdamOptimizer(
        decays(step),
        groups=[ParameterGroup(r"w1.*", clip_norm=1.0), ParameterGroup(r"table0", beta1=0.5)],
    ),
    "LAMB": lambda step: gpuopt.LAMBOptimizer(learning_rate=decays(step)),
    "Adam with averages": lambda step: gpuopt.AdamOptimizer(
        decays(step), averages=gpuopt.ExponentialMovingAverage(0.9, num_updates=step)
    ),
    "Adam that catches up": lambda step: gpuopt.AdamOptimizer(0.1, catch_up=True),
    "LazyAdam in 8 bits": lambda step: gpuopt.LazyAdamOptimizer(decays(step), slot_bits=8),
}


class Twin:
    """An optimizer with variables on several GPUs."""

    def __init__(
        self, optimizer: str, manager: type[gpuopt.LossScaleManager], num_gpus: int, suffix: str
    ) -> None:
        self.variables: dict[str, Variable] = {}
        rng = np.random.default_rng(7)
        for gpu in range(num_gpus):
            for name, shape in ((f"w{gpu}", (70,)), (f"b{gpu}", ()), (f"table{gpu}", (6, 4))):
                value = np.asarray(rng.normal(size=shape), np.float32)
                made = Variable(value, name=f"{name}{suffix}", device=f"gpu:{gpu}")
                self.variables[name] = made
        self.step = Variable(0, name=f"step{suffix}", trainable=False)
        made_manager: Any = manager(8, 2, 2, 3.0, 0.7)  # type: ignore[call-arg]
        self.inner = OPTIMIZERS[optimizer](self.step)
        self.optimizer = LossScaleOptimizer(self.inner, made_manager, accept_after=3)

    def make_step(self, given: dict[str, Any], scale: Any) -> None:
        pairs = []
        for name, (value, rows) in given.items():
            variable = self.variables[name]
            xp = backends.backend_for(variable.device).xp
            with backends.backend_for(variable.device).enter(), np.errstate(over="ignore"):
                there = xp.asarray(value * np.float32(scale))
                if rows is not None:
                    there = IndexedSlices(there, xp.asarray(rows))
            pairs.append((there, variable))
        self.optimizer.apply_gradients(pairs, self.step, loss_scale=scale)

    def state(self) -> dict[str, Any]:
        found = {name: variable.numpy() for name, variable in self.variables.items()}
        for name, variable in self.variables.items():
            for slot in self.inner.get_slot_names():
                if self.inner.get_slot(variable, slot) is not None:
                    found[f"{name} {slot}"] = self.inner.get_slot(variable, slot).numpy()
            averages = self.inner.options.averages
            average = None if averages is None else averages.of([variable])
            if average:
                found[f"{name} average"] = average[0].numpy()
        others = self.optimizer.state_dict()["non_slots"]
        return {**found, **others, "step": self.step.numpy()}


def random_gradients(rng: np.random.Generator, names: list[str]) -> dict[str, Any]:
    """Returns (values, rows or None) by name; some steps are not finite somewhere."""
    chosen = list(rng.choice(names, rng.integers(1, len(names) + 1), replace=False))
    given = {}
    for name in chosen:
        rows = rng.integers(0, 6, 5) if name.startswith("table") else None
        shape = (5, 4) if rows is not None else (70,) if name.startswith("w") else ()
        given[name] = np.asarray(rng.normal(size=shape), np.float32), rows
    if rng.random() < 0.4:
        for name in rng.choice(chosen, rng.integers(1, 3)):
            bad = given[name][0]
            bad[tuple(rng.integers(0, n) for n in bad.shape)] = rng.choice([np.inf, np.nan])
    elif rng.random() < 0.15:
        for name in chosen:
            values, rows = given[name]
            if rows is not None:  # two that add up to infinity
                rows[1] = rows[3]
                values[[1, 3]] = 3e38
    return given


def name_in(described: str | None) -> str | None:
    """Returns the variable that a description names, without its suffix."""
    found = re.search(r'for "(\w+?)(_ours|_theirs)?"', described or "")
    return None if found is None else found[1]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(2)
@pytest.mark.gpus(2)
def test_a_gpu_decides_as_the_host_does_to_the_bit(name: str, seed: int) -> None:
    cupy: Any = pytest.importorskip("cupy")
    num_gpus = min(2 + seed, cupy.cuda.runtime.getDeviceCount())
    streams = [[new_stream(gpu) for _ in range(2)] for gpu in range(num_gpus)]
    rng = np.random.default_rng([len(name), seed])
    with driver.schedule(("newest", "random")[seed], seed) if driver.is_here() else nullcontext():
        manager = gpuopt.ExponentialUpdateLossScaleManager
        ours = Twin(name, manager, num_gpus, "_ours")
        theirs = Twin(name, OwnManager, num_gpus, "_theirs")
        for _ in range(20):
            given = random_gradients(rng, [*ours.variables])
            scale = np.float32(rng.choice([1, 4, 256]))
            # Each thread's current streams of all GPUs.
            used = [some[rng.integers(2)] for some in streams]
            for gpu, stream in enumerate(used):
                with cupy.cuda.Device(gpu):
                    stream.use()
            ours.make_step(given, scale)
            theirs.make_step(given, scale)
            if rng.random() < 0.15:
                told = ours.optimizer.last_nonfinite
                assert name_in(told) == name_in(theirs.optimizer.last_nonfinite)
        for gpu in range(num_gpus):
            with cupy.cuda.Device(gpu):
                cupy.cuda.Stream.null.use()
        got, expected = ours.state(), theirs.state()
    assert theirs.optimizer.num_skipped > 2
    assert got.keys() == expected.keys()
    for each, value in expected.items():
        np.testing.assert_array_equal(got[each], value, err_msg=each)
    assert name_in(ours.optimizer.last_nonfinite) == name_in(theirs.optimizer.last_nonfinite)


def on_each(xp: Any, num_gpus: int, make: Callable[[int], Any]) -> list[Any]:
    """Returns what is made on each GPU."""
    found = []
    for gpu in range(num_gpus):
        with xp.cuda.Device(gpu):
            found.append(make(gpu))
    return found


@contextmanager
def on_new_backends(gpus: Sequence[Device]) -> Iterator[None]:
    """Inside, streams run late, and backends have seen no other stream, as other tests' have."""
    with ExitStack() as inside:
        inside.enter_context(driver.schedule("oldest"))
        for gpu in gpus:
            inside.enter_context(backends.using(gpu, cuda_backend(gpu)))
        yield


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize("is_scaled", [False, True])
@several_gpus
def test_two_launches_on_each_gpu_and_one_more_join_and_nobody_waits(
    num_gpus: int, is_scaled: bool, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    inside = gpuopt.AdamOptimizer(clip_norm=1.0)
    optimizer: Any = inside
    if is_scaled:
        optimizer = LossScaleOptimizer(inside, gpuopt.DynamicLossScale(8.0, 3))
    step = Variable(0, name="step")
    gpus = [Device("gpu", gpu) for gpu in range(num_gpus)]
    with on_new_backends(gpus):
        variables = [Variable(np.ones(5, np.float32), device=gpu) for gpu in gpus]
        good = on_each(xp, num_gpus, lambda gpu: xp.full(5, gpu + 1, np.float32))
        bad = on_each(xp, num_gpus, lambda gpu: xp.full(5, np.nan, np.float32))
        for number in range(25):
            gradients = list(good)
            if is_scaled and number % 4 == 1:
                gradients[number % num_gpus] = bad[number % num_gpus]
            if number % 8 == 7:
                driver.synchronize()  # the host is never more than 8 steps ahead
            before, waited = driver.counts(), len(waits)
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)), step)
            after = driver.counts()
            if number < 3:
                continue  # the first ones wait for memory
            assert len(waits) == waited
            made = {name: after[name] - before[name] for name in after}
            assert made["launches"] == 2 * num_gpus + 1
            # The sums go to the one that joins them, and what follows from them to the others.
            assert made["device to device"] == 2 * (num_gpus - 1)
            assert made["device to host"] == is_scaled
        assert int(step) == (19 if is_scaled else 25)
        assert not is_scaled or optimizer.num_skipped == 6
        norm = np.sqrt(5 * sum((gpu + 1) ** 2 for gpu in range(num_gpus)))
        assert float(inside.global_norm) == np.float32(norm)


@pytest.mark.skipif(not driver.is_here(), reason="launches are counted on the driver")
@pytest.mark.parametrize("is_scaled", [False, True])
@several_gpus
def test_gpus_with_copies_of_all_variables_join_no_sums(
    num_gpus: int, is_scaled: bool, every_schedule: str
) -> None:
    xp: Any = pytest.importorskip("cupy")
    strategy = gpuopt.MirroredStrategy([f"gpu:{gpu}" for gpu in range(num_gpus)])
    optimizer: Any = gpuopt.MomentumOptimizer(0.1, 0.9, clip_norm=1.0)
    alone: Any = gpuopt.MomentumOptimizer(0.1, 0.9, clip_norm=1.0)
    if is_scaled:
        optimizer, alone = (
            LossScaleOptimizer(each, gpuopt.DynamicLossScale(8.0, 2)) for each in (optimizer, alone)
        )
    copies = strategy.variable(np.zeros(700, np.float32)), strategy.variable(np.zeros((9, 4)))
    expected = [Variable(each.replicas[0].numpy()) for each in copies]
    rng = np.random.default_rng(num_gpus)
    rows = rng.integers(0, 9, (num_gpus, 5))
    slices = on_each(
        xp, num_gpus, lambda gpu: IndexedSlices(xp.ones((5, 4)), xp.asarray(rows[gpu]))
    )
    all_slices = IndexedSlices(np.ones((5 * num_gpus, 4)), rows.ravel())

    def train(gradient: Any, some: IndexedSlices) -> None:
        scale = {"loss_scale": np.float32(4)} if is_scaled else {}
        w, table = copies
        pairs = [(gradient, w.local), (some, table.local)]
        # Beside rows that a GPU may refuse, one decides for all.
        optimizer.apply_gradients(pairs[:1] if is_scaled else pairs, **scale)

    values = rng.normal(size=(6, num_gpus, 700)).astype(np.float32)
    if is_scaled:
        values[3, -1, 5] = np.inf
    dense = on_each(xp, num_gpus, lambda gpu: xp.asarray(values[:, gpu]))
    for number in range(6):
        with driver.record_launches() as launches:
            strategy.run(train, (PerReplica([each[number] for each in dense]), PerReplica(slices)))
        scale = {"loss_scale": np.float32(4)} if is_scaled else {}
        summed = list(zip((values[number].sum(axis=0), all_slices), expected, strict=True))
        alone.apply_gradients(summed[:1] if is_scaled else summed, **scale)
        names = [launch.name or "" for launch in launches]
        assert sum("::measure<" in name for name in names) == num_gpus
        assert not [name for name in names if "join" in name]
    if is_scaled:
        assert (optimizer.num_skipped, optimizer.loss_scale) == (1, 16)
        assert optimizer.state_dict()["non_slots"] == alone.state_dict()["non_slots"]
    for mirrored, other in zip(copies, expected, strict=True):
        for copy in mirrored.replicas:
            np.testing.assert_array_equal(copy.numpy(), mirrored.replicas[0].numpy())
            np.testing.assert_allclose(copy.numpy(), other.numpy(), 1e-5, 1e-6)


@pytest.mark.parametrize("kind", ["scaled", "skip"])
@pytest.mark.gpus(2)
def test_gpus_with_copies_leave_out_alike_what_follows_rows_that_one_has_refused(
    kind: str, every_schedule: str
) -> None:
    xp: Any = pytest.importorskip("cupy")
    step = Variable(0, name="step")
    optimizer: Any = gpuopt.AdamOptimizer(
        0.1, on_nonfinite="skip" if kind == "skip" else "propagate"
    )
    if kind == "scaled":
        optimizer = LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale(8.0, 2))
    strategy = gpuopt.MirroredStrategy(["gpu:0", "gpu:1"])
    w = strategy.variable(np.zeros(4, np.float32), name="w")
    table = Variable(np.zeros((6, 4), np.float32), name="table", device="gpu:1")
    ones = PerReplica(on_each(xp, 2, lambda gpu: xp.ones(4, np.float32)))

    def step_of_copies() -> None:
        strategy.update(optimizer, [(ones, w)], step)

    def step_of_row(row: int) -> None:
        with xp.cuda.Device(1):
            slices = IndexedSlices(xp.ones((1, 4), np.float32), xp.asarray([row]))
        optimizer.apply_gradients([(slices, table)], step)

    step_of_copies()
    step_of_row(1)
    optimizer.check()
    step_of_row(6)
    step_of_copies()
    step_of_copies()
    with pytest.raises(IndexError, match="row 6 is not in"):
        optimizer.check()
    first, second = (copy.numpy() for copy in w.replicas)
    np.testing.assert_array_equal(first, second)
    if kind == "scaled":
        assert (int(step), optimizer.loss_scale) == (2, 16)


@pytest.mark.gpus(2)
def test_a_step_inside_one_of_copies_has_sums_of_its_own(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    strategy = gpuopt.MirroredStrategy(["gpu:0", "gpu:1"])
    w = strategy.variable(np.zeros(4, np.float32), name="w")
    a, b = (Variable(np.zeros(1, np.float32), device=f"gpu:{gpu}") for gpu in range(2))
    gradients = on_each(xp, 2, lambda gpu: xp.full(1, 3 + gpu, np.float32))
    inside = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0)

    def rate() -> float:
        inside.apply_gradients(list(zip(gradients, (a, b), strict=True)))
        return 0.5

    optimizer = gpuopt.GradientDescentOptimizer(rate, clip_norm=2.0)
    ones = PerReplica(on_each(xp, 2, lambda gpu: xp.ones(4, np.float32)))
    strategy.update(optimizer, [(ones, w)])
    assert float(inside.global_norm) == 5
    np.testing.assert_allclose([*a.numpy(), *b.numpy()], [-0.6, -0.8], 1e-6)
    for copy in w.replicas:
        np.testing.assert_array_equal(copy.numpy(), np.float32([-0.5] * 4))


@pytest.mark.gpus(2)
def test_the_first_copy_is_named_whichever_gpu_decides(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    optimizer = LossScaleOptimizer(gpuopt.AdamOptimizer(0.1), gpuopt.DynamicLossScale(8.0, 2))
    strategy = gpuopt.MirroredStrategy(["gpu:1", "gpu:0"])
    variables = [strategy.variable(np.zeros(4, np.float32), name=name) for name in "vw"]
    for bad in (1.0, np.inf):

        def train(factor: float = bad) -> None:
            ones = xp.ones(4, np.float32)
            v, w = (each.local for each in variables)
            optimizer.apply_gradients([(ones, v), (ones * np.float32(factor), w)])

        strategy.run(train)
    assert optimizer.last_nonfinite == 'gradient for "w" is not finite'


@pytest.mark.gpus(2)
def test_copies_that_lars_updates_stay_alike(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    strategy = gpuopt.MirroredStrategy(["gpu:0", "gpu:1"])
    w = strategy.variable(np.linspace(1, 2, 700, dtype=np.float32), name="w")
    alone = Variable(np.linspace(1, 2, 700, dtype=np.float32))
    ours, theirs = (gpuopt.LARSOptimizer(0.1, eeta=0.1, clip_norm=1.0) for _ in range(2))
    gradient = np.random.default_rng(5).normal(size=700).astype(np.float32)
    given = PerReplica(on_each(xp, 2, lambda gpu: xp.asarray(gradient / 2)))
    for _ in range(3):
        strategy.update(ours, [(given, w)])
        theirs.apply_gradients([(gradient, alone)])
    first, second = (copy.numpy() for copy in w.replicas)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone.numpy(), 1e-5)


@pytest.mark.gpus(2)
def test_rows_that_one_gpu_refuses_leave_all_as_they_were(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    step = Variable(0, name="step")
    w = Variable(np.ones(4, np.float32), name="w", device="gpu:0")
    table = Variable(np.ones((6, 4), np.float32), name="table", device="gpu:1")
    optimizer = LossScaleOptimizer(gpuopt.LazyAdamOptimizer(), gpuopt.DynamicLossScale(8.0))
    dense = on_each(xp, 1, lambda gpu: xp.ones(4, np.float32))[0]

    def make_step(row: int) -> None:
        with xp.cuda.Device(1):
            slices = IndexedSlices(xp.ones((1, 4), np.float32), xp.asarray(np.int64([row])))
        optimizer.apply_gradients([(dense, w), (slices, table)], step)

    make_step(1)
    optimizer.check()
    before = w.numpy(), table.numpy()
    make_step(6)
    with pytest.raises(IndexError, match="row 6 is not in"):
        optimizer.check()
    assert (int(step), optimizer.num_skipped, optimizer.loss_scale) == (1, 0, 8)
    for variable, value in zip((w, table), before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    make_step(2)
    assert int(step) == 2
    assert optimizer.last_nonfinite is None


@pytest.mark.gpus(2)
def test_a_gpu_goes_on_deciding_about_steps_of_others_alone(
    every_schedule: str, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    first, second = (
        Variable(np.zeros(5, np.float32), name=f"w{gpu}", device=f"gpu:{gpu}") for gpu in (0, 1)
    )
    step = Variable(0, name="step")
    optimizer = LossScaleOptimizer(
        gpuopt.MomentumOptimizer(1.0, 0.0), gpuopt.DynamicLossScale(64.0, 100)
    )
    ones = on_each(xp, 2, lambda gpu: xp.ones(5, np.float32))
    bad = on_each(xp, 2, lambda gpu: xp.full(5, np.inf, np.float32))
    before = 0
    for number, pairs in enumerate(
        ([(ones[0], first)], [(ones[1], second)], [(bad[1], second)], [(ones[0], first)])
    ):
        optimizer.apply_gradients(pairs, step)
        if number == 0:
            before = len(waits)  # the first one of a process waits for memory
    if driver.is_here():
        assert len(waits) == before
    np.testing.assert_array_equal(first.numpy(), np.float32([-2] * 5))
    np.testing.assert_array_equal(second.numpy(), np.float32([-1] * 5))
    assert (int(step), optimizer.num_skipped, optimizer.loss_scale) == (3, 1, 32)
    assert optimizer.last_nonfinite == 'gradient for "w1" is not finite'


def test_the_first_gradient_that_was_not_finite_is_told_by_name(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    dense = {n: Variable(np.ones(5000, np.float32), name=n, device="gpu:0") for n in "abcd"}
    tables = {
        name: Variable(np.ones((6, 4), np.float32), name=name, device="gpu:0") for name in "xyz"
    }
    scaling = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(
            0.5, groups=[ParameterGroup("b", clip_norm=1.0), ParameterGroup("y", clip_norm=2.0)]
        ),
        gpuopt.DynamicLossScale(2.0**15, 100),
    )

    def make_step(*bad: str) -> None:
        pairs: list[Any] = []
        for name, variable in dense.items():
            gradient = np.ones(5000, np.float32)
            if name in bad:
                gradient[[4000, 4500]] = np.inf
            # A gradient that is a list has an array of its own, and keeps its place.
            pairs.append((gradient.tolist() if name == "d" else xp.asarray(gradient), variable))
        for name, table in tables.items():
            values = np.ones((300, 4), np.float32)
            if name in bad:
                values[[150, 297]] = 3e38
            rows = np.tile(np.int64([1, 3, 5]), 100)
            pairs.append((IndexedSlices(xp.asarray(values), xp.asarray(rows)), table))
        scaling.apply_gradients(pairs)

    in_sum = ", or equal rows of it add up to what is not"
    make_step()
    assert scaling.last_nonfinite is None
    for bad in ("c", "bc", "bxz", "yz", "zd", "d", "xz"):
        first = min(bad)  # as the pairs are in order
        make_step(*bad)
        make_step()
        make_step()
        more = in_sum if first in tables else ""
        assert scaling.last_nonfinite == f'gradient for "{first}" is not finite{more}'
    # The host has heard of it meanwhile, without anybody asking.
    make_step("a")
    for _ in range(40):
        make_step()
    make_step()
    assert scaling.last_nonfinite == 'gradient for "a" is not finite'
    assert scaling.num_skipped == 8


def replicated(xp: Any, num_gpus: int, scaling: Any, step: Variable) -> Any:
    """Returns a function of factors that makes a step in a replica on each GPU, and the copies."""
    strategy = gpuopt.MirroredStrategy([f"gpu:{gpu}" for gpu in range(num_gpus)])
    w = strategy.variable(np.zeros(5, np.float32), name="w")
    factors = on_each(xp, num_gpus, lambda gpu: xp.ones((), np.float32))
    infinite = on_each(xp, num_gpus, lambda gpu: xp.full((), np.inf, np.float32))

    def make_step(bad: int | None) -> None:
        given = [infinite[at] if at == bad else factors[at] for at in range(num_gpus)]

        def train(factor: Any) -> None:
            scaling.minimize(lambda: xp.sum(w.local.value() * factor), step, [w.local])

        strategy.run(train, (PerReplica(given),))

    return make_step, w.replicas


def in_towers(xp: Any, num_gpus: int, scaling: Any, step: Variable) -> Any:
    """The same in towers, of one variable."""
    w = Variable(np.zeros(5, np.float32), name="w", device="gpu:0")
    tower = gpuopt.TowerOptimizer(scaling)
    good = xp.ones(num_gpus, np.float32)
    infinite = [xp.where(xp.arange(num_gpus) == at, np.inf, good) for at in range(num_gpus)]
    infinite = [each.astype(np.float32) for each in infinite]

    def model(factor: Any) -> Any:
        def loss() -> Any:
            return xp.sum(w.value() * factor[0])

        tower.minimize(loss, step, [w])
        return factor[0]

    train = gpuopt.replicate(model, devices=["gpu:0"] * num_gpus)

    def make_step(bad: int | None) -> None:
        train(good if bad is None else infinite[bad])

    return make_step, [w]


@pytest.mark.parametrize("make", [replicated, in_towers])
@pytest.mark.gpus(2)
def test_replicas_and_towers_decide_alike_and_the_host_waits_for_nothing(
    make: Any, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    scaling = LossScaleOptimizer(
        gpuopt.MomentumOptimizer(1.0, 0.0), gpuopt.DynamicLossScale(64.0, 100)
    )
    step = Variable(0, name="step")
    with ExitStack() as inside:
        if driver.is_here():
            inside.enter_context(driver.schedule("oldest"))
        for gpu in (Device("gpu", 0), Device("gpu", 1)):
            inside.enter_context(backends.using(gpu, cuda_backend(gpu)))
        make_step, copies = make(xp, 2, scaling, step)
        for number in range(12):
            if number % 8 == 7 and driver.is_here():
                driver.synchronize()  # the host is never more than 8 steps ahead
            before = len(waits)
            make_step(number % 2 if number % 4 == 1 else None)
            if number > 2 and driver.is_here():
                assert len(waits) == before
        assert (int(step), scaling.num_skipped, scaling.loss_scale) == (9, 3, 8)
        assert scaling.last_nonfinite == 'gradient for "w" is not finite'
        for each in copies:
            np.testing.assert_array_equal(each.numpy(), np.float32([-9] * 5))
