"""A GPU decides whether a step with a scaled loss is made, and the host waits for nothing.

tests/fuzz/test_programs_on_streams.py compares random programs of such steps with an oracle on the
host: with rows that are refused, reads, failures, and on several GPUs.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import driver
import numpy as np
import pytest
from interrupt_at import Interrupt, each_moment
from other_thread import in_threads

import gpuopt
from gpuopt import IndexedSlices, LossScaleOptimizer, Variable, backends
from gpuopt.backends.cuda import cuda_backend
from gpuopt.device import Device
from gpuopt.step.device_scaling import DeviceScaling
from gpuopt.variables import unfinished

pytestmark = pytest.mark.gpu


def decays(step: Variable) -> Any:
    return gpuopt.exponential_decay(0.1, step, 3, 0.5)


def gradients(xp: Any, bad: bool = False) -> tuple[Any, IndexedSlices]:
    rows = xp.asarray(np.int64([1, 3, 1]))
    values = xp.ones((3, 4), np.float32)
    dense = xp.full(5, np.nan if bad else 1.0, np.float32)
    return dense, IndexedSlices(values, rows)


# Hyperparameters, and whether a GPU decides.
STEADY: dict[str, tuple[dict[str, Any], bool]] = {
    "numbers": ({"learning_rate": 0.1}, True),
    "schedule": ({}, True),
    "clipped": ({"learning_rate": 0.1, "clip_norm": 1.0}, True),
    "function": ({"learning_rate": lambda: 0.1}, False),
    "schedule of another counter": ({"learning_rate": "another"}, False),
    "schedule that clips": ({"learning_rate": 0.1, "clip_norm": None}, False),
}


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "mixed") for name in STEADY), ("function", "dense"), ("numbers", "sparse")],
)
def test_the_host_waits_for_no_step_that_a_gpu_can_decide_about(
    name: str, kind: str, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    options, gpu_decides = STEADY[name]
    gpu = Device("gpu", 0)
    step = Variable(0, name="step")
    if options.get("learning_rate") == "another":
        options = {"learning_rate": decays(Variable(0, name="another"))}
    if "learning_rate" not in options:
        options = {"learning_rate": decays(step)}
    if "clip_norm" in options and options["clip_norm"] is None:
        options = {**options, "clip_norm": decays(step)}
    optimizer = LossScaleOptimizer(
        gpuopt.LazyAdamOptimizer(**options),
        gpuopt.DynamicLossScale(8.0, 3),
        host_may_wait=not gpu_decides,
    )
    # With a backend that has seen no other stream, as other tests' has.
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
        table = Variable(np.ones((6, 4), np.float32), name="table", device="gpu:0")
        for number in range(25):
            dense, slices = gradients(xp, bad=number % 4 == 1)
            if kind == "sparse":
                slices.values[0, 0] = dense[0]
            pairs = {"dense": [(dense, w)], "sparse": [(slices, table)]}.get(
                kind, [(dense, w), (slices, table)]
            )
            before = len(waits)
            optimizer.apply_gradients(pairs, step)
            if number % 8 == 7:
                driver.synchronize()  # the host is never more than 8 steps ahead
            if number == 0:
                continue  # the first one of a process waits for memory
            if gpu_decides:
                assert len(waits) == before
            elif number % 4 == 2:  # a step that is made, after one that was not
                # For the gradients, and before that for the check of rows.
                assert len(waits) - before == (1 if kind == "dense" else 2)
        assert (int(step), optimizer.num_skipped) == (19, 6)


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
def test_the_host_waits_where_8_steps_are_not_known_to_be_made(waits: list[str]) -> None:
    xp: Any = pytest.importorskip("cupy")
    gpu = Device("gpu", 0)
    step = Variable(0, name="step")
    optimizer = LossScaleOptimizer(
        gpuopt.AdamOptimizer(decays(step)), gpuopt.FixedLossScaleManager(8.0)
    )
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
        num_waits = []
        for number in range(14):
            if number == 2:
                driver.synchronize()  # until then, it also waits for memory
            before = len(waits)
            optimizer.apply_gradients([(gradients(xp, number == 5)[0], w)], step)
            num_waits.append(len(waits) - before)
        assert num_waits[2:] == [0] * 8 + [1] * 4
        assert int(step) == 13


def test_functions_of_a_step_are_called_once_whatever_is_not_known(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    calls = []

    class Noting(gpuopt.AdamOptimizer):
        def _prepare(self) -> None:
            calls.append(1)
            super()._prepare()

    w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
    optimizer = LossScaleOptimizer(Noting(), gpuopt.FixedLossScaleManager(8.0))
    for number in range(12):
        optimizer.apply_gradients([(gradients(xp, number % 3 == 1)[0], w)])
        assert len(calls) == number + 1
    assert optimizer.num_skipped == 4


@pytest.mark.parametrize("name", ["learning_rate", "beta1"])
def test_a_hyperparameter_that_is_set_holds_for_the_steps_since(
    name: str, every_schedule: str
) -> None:
    xp: Any = pytest.importorskip("cupy")
    ours = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
    theirs = Variable(np.ones(5, np.float32), name="w_theirs", device="gpu:0")
    inside, other = gpuopt.AdamOptimizer(0.1), gpuopt.AdamOptimizer(0.1)
    optimizer = LossScaleOptimizer(inside, gpuopt.FixedLossScaleManager(1.0))
    for number in range(8):
        is_bad = number in (1, 3, 4, 6)
        if number in (2, 4, 7):
            optimizer.hyperparameters[name] = other.hyperparameters[name] = 0.1 * number
        gradient = gradients(xp, is_bad)[0]
        optimizer.apply_gradients([(gradient, ours)])
        if not is_bad:
            other.apply_gradients([(gradient, theirs)])
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert float(inside.state.other("beta1_power")) == float(other.state.other("beta1_power"))


@pytest.mark.skipif(not driver.is_here(), reason="a real GPU may be done before the host looks")
@pytest.mark.parametrize("name", ["learning_rate", "beta1"])
def test_the_host_waits_for_a_hyperparameter_that_powers_follow_from(
    name: str, waits: list[str]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    gpu = Device("gpu", 0)
    optimizer = LossScaleOptimizer(gpuopt.AdamOptimizer(), gpuopt.FixedLossScaleManager(8.0))
    with driver.schedule("oldest"), backends.using(gpu, cuda_backend(gpu)):
        w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
        for number in range(8):
            optimizer.hyperparameters[name] = 0.1 + 0.01 * number
            before = len(waits)
            optimizer.apply_gradients([(gradients(xp)[0], w)])
            if number > 1:  # until then, it also waits for memory
                assert (len(waits) > before) == (name == "beta1")


def test_a_step_whose_own_function_assigns_the_global_step_goes_on_from_there(
    every_schedule: str,
) -> None:
    xp: Any = pytest.importorskip("cupy")
    step = Variable(0, name="step", trainable=False)

    class Jumps(gpuopt.GradientDescentOptimizer):
        to: int | None = None

        def _prepare(self) -> None:
            if self.to is not None:
                step.assign(self.to)
                self.to = None
            super()._prepare()

    w = Variable(np.zeros(5, np.float32), name="w", device="gpu:0")
    inside = Jumps(gpuopt.piecewise_constant(step, [10], [1.0, 100.0]))
    optimizer = LossScaleOptimizer(inside, gpuopt.FixedLossScaleManager(8.0))
    for bad in (False, True, False):
        optimizer.apply_gradients([(gradients(xp, bad)[0], w)], step)
    inside.to = 50
    for bad in (False, True, False):
        optimizer.apply_gradients([(gradients(xp, bad)[0], w)], step)
    assert int(step) == 52
    np.testing.assert_array_equal(w.numpy(), np.float32([-202] * 5))


def test_steps_of_variables_of_other_types_take_the_scalars_of_the_gpus_count(
    every_schedule: str, decided: list[Any]
) -> None:
    xp: Any = pytest.importorskip("cupy")
    types = {"floats": np.float32, "doubles": np.float64}
    ours = {name: Variable(np.ones(5, t), name=name, device="gpu:0") for name, t in types.items()}
    theirs = {name: Variable(np.ones(5, t)) for name, t in types.items()}
    optimizer = LossScaleOptimizer(
        gpuopt.AdamOptimizer(0.1, 0.7, 0.8), gpuopt.DynamicLossScale(8.0)
    )
    expected = gpuopt.AdamOptimizer(0.1, 0.7, 0.8)
    # Each kind of step comes after the other ones, whether these are made or not.
    steps = itertools.product(("floats", "doubles", "floats doubles"), (False, True), (1, 2))
    for names, is_bad, number in steps:
        given = {name: np.full(5, number, types[name]) for name in names.split()}
        if is_bad:
            given[names.split()[0]][2] = np.nan
        else:
            expected.apply_gradients([(each, theirs[name]) for name, each in given.items()])
        optimizer.apply_gradients([(xp.asarray(each), ours[n]) for n, each in given.items()])
    assert len(decided) == 12
    for name, variable in ours.items():
        np.testing.assert_allclose(variable.numpy(), theirs[name].numpy(), rtol=1e-6)


def test_reads_wait_and_are_right(waits: list[str]) -> None:
    xp: Any = pytest.importorskip("cupy")
    w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
    step = Variable(0, name="step")
    optimizer = LossScaleOptimizer(gpuopt.AdamOptimizer(), gpuopt.DynamicLossScale(8.0, 2))
    for number in range(7):
        optimizer.apply_gradients([(gradients(xp, number in (2, 3))[0], w)], step)
    assert step.numpy() == 5
    assert step.value() == 5
    assert f"{step!r}".endswith("value=5>")
    assert optimizer.loss_scale == 8 * 2 / 2 / 2 * 2
    assert optimizer.num_skipped == 2
    powers = optimizer.state_dict()["non_slots"]
    np.testing.assert_allclose(powers["beta1_power"], np.float32(0.9) ** 6, rtol=1e-6)
    step.assign(100)
    optimizer.apply_gradients([(gradients(xp)[0], w)], step)
    optimizer.apply_gradients([(gradients(xp, True)[0], w)], step)
    assert int(step) == 101


def test_a_scale_that_grows_on_and_on_makes_no_step_0() -> None:
    w = Variable(np.ones(3, np.float32), name="w", device="gpu:0")
    manager = gpuopt.DynamicLossScale(2.0**96, 1)
    optimizer = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(0.25, clip_norm=0.5), manager)
    gradient = np.float32([2, 4, 4]) * np.float32(1e-7)
    expected = np.ones(3, np.float32)
    for _ in range(33):
        scale = manager.get_loss_scale()
        given = backends.to_device(gradient * scale, w.device)
        optimizer.apply_gradients([(given, w)], loss_scale=scale)
        expected -= np.float32(0.25) * gradient
    assert (optimizer.num_skipped, manager.get_loss_scale()) == (0, 2.0**100)
    np.testing.assert_array_equal(w.numpy(), expected)


def test_another_threads_reads_and_steps_come_between_steps(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
    step = Variable(0, name="step")
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), gpuopt.FixedLossScaleManager(2.0)
    )
    bad, good = gradients(xp, True)[0], gradients(xp)[0]
    seen: list[int] = []

    def work() -> None:
        for number in range(15):
            optimizer.apply_gradients([(bad if number % 3 == 0 else good, w)], step)
            seen.append(int(step))

    in_threads(work, work)
    assert (int(step), optimizer.num_skipped) == (20, 10)
    np.testing.assert_array_equal(w.numpy(), np.float32([1 - 20] * 5))
    assert all(0 <= each <= 20 for each in seen)


def test_a_step_that_another_one_has_overtaken_is_made_by_the_numbers_after_it(
    monkeypatch: pytest.MonkeyPatch, every_schedule: str
) -> None:
    xp: Any = pytest.importorskip("cupy")
    w = Variable(np.zeros(5, np.float32), name="w", device="gpu:0")
    step = Variable(0, name="step")
    rate = gpuopt.piecewise_constant(step, [0, 1], [1.0, 10.0, 100.0])
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(rate), gpuopt.DynamicLossScale(8.0, 2)
    )
    gradient = gradients(xp)[0]
    prepare, others = DeviceScaling.prepare, [1]

    def let_another_overtake(self: DeviceScaling, *given: Any) -> bool:
        is_decided = prepare(self, *given)
        if others:
            others.clear()
            in_threads(lambda: optimizer.apply_gradients([(gradient, w)], step))
        return is_decided

    monkeypatch.setattr(DeviceScaling, "prepare", let_another_overtake)
    optimizer.apply_gradients([(gradient, w)], step)
    optimizer.apply_gradients([(gradient, w)], step)
    np.testing.assert_array_equal(w.numpy(), np.float32([-111] * 5))
    assert (int(step), optimizer.loss_scale) == (3, 16)


def test_optimizers_that_count_by_one_variable_see_each_others_steps(every_schedule: str) -> None:
    xp: Any = pytest.importorskip("cupy")
    w = Variable(np.ones(5, np.float32), name="w", device="gpu:0")
    step = Variable(0, name="step")
    first, second = (
        LossScaleOptimizer(
            gpuopt.GradientDescentOptimizer(
                gpuopt.piecewise_constant(step, [1, 3], [1.0, 10.0, 100.0])
            ),
            gpuopt.FixedLossScaleManager(2.0),
        )
        for _ in range(2)
    )
    plain = gpuopt.GradientDescentOptimizer(1000.0)
    bad, good = gradients(xp, True)[0], gradients(xp)[0]
    first.apply_gradients([(good, w)], step)
    first.apply_gradients([(bad, w)], step)
    second.apply_gradients([(good, w)], step)
    second.apply_gradients([(bad, w)], step)
    first.apply_gradients([(good, w)], step)
    first.apply_gradients([(bad, w)], step)
    plain.apply_gradients([(good, w)], step)
    first.apply_gradients([(good, w)], step)
    np.testing.assert_array_equal(w.numpy(), np.float32([1 - 1 - 1 - 10 - 1000 - 100] * 5))
    assert int(step) == 5


# Where the host counts and notes what it counts.
COUNTING = ["gpuopt/step/step.py", "host_scalar.py", "device_scaling.py", "ledger.py", "chain.py"]


def test_a_skipped_step_that_ctrl_c_ends_is_not_counted() -> None:
    xp = pytest.importorskip("cupy")
    variable, step = Variable(np.ones(3, np.float32), device="gpu:0"), Variable(0, trainable=False)
    adam = gpuopt.AdamOptimizer(0.1)
    optimizer = LossScaleOptimizer(adam, gpuopt.DynamicLossScale(8.0, 2, 2.0))
    good, bad = (xp.asarray(np.float32([1, 1, last])) for last in (1, np.inf))

    def numbers() -> list[float]:
        return [float(each.numpy()) for each in (step, *adam.state.others().values())]

    for interrupt in each_moment(COUNTING, least=20):
        optimizer.accept_unfinished_step()
        optimizer.apply_gradients([(good, variable)], step)
        before, value = numbers(), variable.numpy()
        with suppress(Interrupt), interrupt:
            optimizer.apply_gradients([(bad, variable)], step)
        assert numbers() == before, interrupt.moment
        np.testing.assert_array_equal(variable.numpy(), value)
    assert optimizer.num_skipped > 1


def test_a_skipped_step_that_ctrl_c_ends_is_counted_once_if_it_is_accepted() -> None:
    xp = pytest.importorskip("cupy")
    variable, step = Variable(np.ones(3, np.float32), device="gpu:0"), Variable(0, trainable=False)
    optimizer = LossScaleOptimizer(gpuopt.AdamOptimizer(0.1), gpuopt.DynamicLossScale(8.0, 2, 2.0))
    good, bad = (xp.asarray(np.float32([1, 1, last])) for last in (1, np.inf))
    num_accepted = 0
    for interrupt in each_moment(COUNTING, least=20):
        optimizer.apply_gradients([(good, variable)], step)
        with suppress(Interrupt), interrupt:
            optimizer.apply_gradients([(bad, variable)], step)
        num_accepted += len(unfinished.unfinished_steps())
        optimizer.accept_unfinished_step()
        optimizer.apply_gradients([(good, variable)], step)
        assert int(step) == 2 * interrupt.moment + num_accepted


def test_an_apply_gradients_of_a_users_own_runs_once_and_may_make_two_steps() -> None:
    calls = []

    class Twice(gpuopt.MomentumOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
            calls.append(len(grads_and_vars))
            if len(calls) > 3:
                raise AssertionError("called again")
            for pair in grads_and_vars:
                super().apply_gradients([pair], global_step, name)

    xp = pytest.importorskip("cupy")
    variables = [Variable(np.zeros(2, np.float32), device="gpu:0") for _ in range(2)]
    optimizer = LossScaleOptimizer(Twice(1.0, 0.5), gpuopt.FixedLossScaleManager(8.0))
    step = Variable(0, name="step", trainable=False)
    for bad in ([], [0], []):
        gradients = [xp.full(2, np.nan if k in bad else 8, np.float32) for k in range(2)]
        pairs = list(zip(gradients, variables, strict=True))
        optimizer.apply_gradients(pairs, step, loss_scale=8.0)
    assert calls == [2, 2, 2]
    assert [each.numpy()[0] for each in variables] == [-2.5, -4.25]
    assert (int(step), optimizer.num_skipped) == (5, 1)
