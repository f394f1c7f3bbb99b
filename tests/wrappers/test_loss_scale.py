"""LossScaleOptimizer and its managers.

tests/fuzz/test_all_stages.py compares steps that are skipped, and restores, with a model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupt_at import HandleAt, Interrupt, each_moment

import gpuopt
from gpuopt import LossScaleOptimizer, Variable
from gpuopt.backends import to_device
from gpuopt.device import Device
from gpuopt.step.replica_context import replica_context

MANAGERS: dict[str, Callable[[], gpuopt.LossScaleManager]] = {
    "fixed": lambda: gpuopt.FixedLossScaleManager(1024.0),
    "exponential": lambda: gpuopt.ExponentialUpdateLossScaleManager(8, 2, 2, 3.0, 0.7),
    "dynamic": lambda: gpuopt.DynamicLossScale(4.0, 3, 2.5),
}

on_each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("gpu:0", marks=pytest.mark.gpu)]
)


def make(manager: str = "dynamic", opt: Any = None, **options: Any) -> LossScaleOptimizer:
    return LossScaleOptimizer(
        gpuopt.AdamOptimizer(0.1) if opt is None else opt, MANAGERS[manager](), **options
    )


def test_wrappers_around_it_tell_what_it_tells() -> None:
    scaling = make("dynamic")
    optimizer = gpuopt.MovingAverageOptimizer(gpuopt.GradientAccumulationOptimizer(scaling, 1))
    w = Variable(np.ones(2, np.float32), name="w")
    optimizer.apply_gradients([(np.float32([1, np.nan]), w)])
    told = optimizer.loss_scale, optimizer.num_skipped, optimizer.skipped_in_a_row
    assert told == (scaling.loss_scale, 1, 1)
    assert optimizer.last_nonfinite == scaling.last_nonfinite is not None
    assert not hasattr(
        gpuopt.GradientAccumulationOptimizer(gpuopt.AdamOptimizer(), 2), "loss_scale"
    )


@pytest.mark.internal
@pytest.mark.parametrize("kind", ["AdamW", "Lion", "Adam", "TorchAdamW"])
def test_a_handlers_step_of_another_optimizer_is_not_the_scaled_one(kind: str) -> None:
    """At any moment of the step, also where the optimizer inside has its own `apply_gradients`."""
    arguments = {"weight_decay": 0.0} if kind == "AdamW" else {}
    w, other = Variable(np.ones(2, np.float32)), Variable(np.zeros(1, np.float32))
    scaled = make("fixed", getattr(gpuopt, f"{kind}Optimizer")(**arguments))
    optimizer = gpuopt.MovingAverageOptimizer(scaled)
    apart = gpuopt.GradientDescentOptimizer(1.0)
    expected, moment, is_over = 0.0, 0, False
    while not is_over:
        moment += 1 if os.environ.get("GPUOPT_FULL") else 4
        stepped = []

        def handle() -> None:
            with suppress(RuntimeError):  # in the middle of the other one's
                apart.apply_gradients([(np.ones(1, np.float32), other)])
                stepped.append(1)  # noqa: B023

        with HandleAt(moment, handle, ["gpuopt/"]) as handled:
            optimizer.apply_gradients([(np.ones(2, np.float32), w)])
        expected -= len(stepped)
        is_over = handled.is_over
        assert other.numpy() == expected, moment
    assert optimizer.averages.average(other) is None
    assert moment > 50


@pytest.mark.contract
@pytest.mark.parametrize(
    ("make", "listed"),
    [
        (
            lambda: gpuopt.DynamicLossScale(init_scale=8.0),
            "DynamicLossScale takes no init_scale; it takes initial_loss_scale, increment_period",
        ),
        (
            lambda: gpuopt.FixedLossScaleManager(scale=8.0),
            "FixedLossScaleManager takes no scale; it takes loss_scale",
        ),
        (
            lambda: gpuopt.LossScaleOptimizer(gpuopt.AdamOptimizer(), manager=None),
            "LossScaleOptimizer takes no manager; it takes opt, loss_scale_manager, accept_after",
        ),
    ],
)
def test_an_unknown_argument_is_refused_with_those_that_there_are(make: Any, listed: str) -> None:
    with pytest.raises(TypeError, match=listed):
        make()


def test_a_skipped_steps_averages_stay_and_the_gradient_is_named() -> None:
    w, u = Variable([1.0, 2.0], name="w"), Variable([1.0], name="u")
    averages = gpuopt.MovingAverageOptimizer(gpuopt.AdamOptimizer(0.1), 0.5)
    optimizer = make(opt=averages)
    assert optimizer.last_nonfinite is None
    optimizer.apply_gradients([(np.float32([1, 2]), w), (np.float32([1]), u)])
    before = averages.averages.average(w).numpy()
    optimizer.apply_gradients([(np.float32([1, np.nan]), w), (np.float32([np.inf]), u)])
    np.testing.assert_array_equal(averages.averages.average(w).numpy(), before)
    assert (optimizer.num_skipped, optimizer.skipped_in_a_row) == (1, 1)
    assert optimizer.last_nonfinite == (
        'gradient for "w" is not finite: 1 of 2 values, the first is nan at [1]'
    )
    optimizer.apply_gradients([(np.float32([1, 2]), w), (np.float32([1]), u)])
    assert (optimizer.num_skipped, optimizer.skipped_in_a_row) == (1, 0)
    assert (averages.averages.average(w).numpy() != before).all()


@pytest.mark.parametrize(("dtype", "large"), [(np.float32, 3e38), (np.float64, 1e200)])
def test_finite_gradients_whose_squares_are_infinite_make_a_step(dtype: Any, large: float) -> None:
    w = Variable([1.0, 2.0], name="w", dtype=dtype)
    optimizer = make(opt=gpuopt.GradientDescentOptimizer(dtype(1e-30)))
    optimizer.apply_gradients([(np.array([large, 1], dtype), w)])
    assert optimizer.num_skipped == 0
    np.testing.assert_allclose(w.numpy(), dtype([1 - large * 1e-30, 2]))


@on_each_device
def test_gradients_are_clipped_to_a_norm_at_any_scale(device: str) -> None:
    rng = np.random.default_rng(11)
    gradient = rng.normal(size=20000).astype(np.float32)
    norms, moved = [], []
    for scale in map(np.float32, (1, 2.0**66, 2.0**110)):
        w = Variable(np.ones_like(gradient), name="w", device=device)
        clipping = gpuopt.GradientDescentOptimizer(1.0, clip_norm=2.0)
        optimizer = make("fixed", clipping)
        given = to_device(gradient * scale, Device.parse(device))
        optimizer.apply_gradients([(given, w)], loss_scale=scale)
        assert optimizer.num_skipped == 0
        norms.append(float(clipping.global_norm))
        moved.append(w.numpy())
    np.testing.assert_allclose(norms, np.linalg.norm(gradient), rtol=1e-6)
    assert len(set(norms)) == 1
    np.testing.assert_array_equal(moved[1:], moved[:1] * 2)


@pytest.mark.parametrize("form", ["tensorflow", "torch", "apex"])
@on_each_device
def test_a_step_whose_norm_is_infinite_is_left_out_where_it_would_write_nan(
    device: str, form: str
) -> None:
    w = Variable(np.ones(2, np.float32), name="w", device=device)
    inside = gpuopt.GradientDescentOptimizer(1.0, clip_norm=5.0, clip_form=form)
    optimizer = make("dynamic", inside)
    is_skipped = form == "tensorflow"
    for gradient, skipped in (([3e20, 4e20], is_skipped), ([3, 4], is_skipped)):
        given = to_device(np.float32(gradient), Device.parse(device))
        optimizer.apply_gradients([(given, w)])
        assert optimizer.num_skipped == skipped
        told = optimizer.last_nonfinite
        assert (told is None) or "the norm is more than its type holds" in told
        assert (told is not None) == is_skipped
    np.testing.assert_allclose(w.numpy(), [-2, -3], rtol=1e-6)
    assert optimizer.loss_scale == (np.float32(4) / np.float32(2.5) if is_skipped else 4)


@on_each_device
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 1e-3}], ids=["plain", "clipped"])
def test_steps_are_right_at_every_scale_that_growth_reaches(clip: Any, device: str) -> None:
    w = Variable(np.zeros(4, np.float32), name="w", device=device)
    manager = gpuopt.DynamicLossScale(2.0**50, 1)
    inside = gpuopt.GradientDescentOptimizer(1.0, **clip)
    optimizer, moved = LossScaleOptimizer(inside, manager), []
    for _ in range(80):
        optimizer.minimize(lambda: (w * 2.0**10).sum(), var_list=[w])
        moved.append(w.numpy()[0])
        w.assign(np.zeros(4, np.float32))
    assert optimizer.loss_scale == 2.0**100
    np.testing.assert_allclose(moved, -(5e-4 if clip else 2.0**10), rtol=1e-6)


@on_each_device
def test_the_largest_scale_divides_gradients(device: str) -> None:
    w = Variable(np.zeros(4, np.float32), name="w", device=device)
    optimizer = LossScaleOptimizer(
        gpuopt.GradientDescentOptimizer(1.0), gpuopt.FixedLossScaleManager(2.0**126)
    )
    optimizer.minimize(lambda: (w * 0.25).sum(), var_list=[w])
    assert w.numpy().tolist() == [-0.25] * 4


class _Returning(gpuopt.LossScaleManager):
    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def get_loss_scale(self) -> Any:
        return self.scale

    def update_loss_scale(self, finite_grads: Any) -> None:
        pass


@pytest.mark.contract
@pytest.mark.parametrize("scale", [0.0, -8.0, 0.5, np.nan, np.inf, 2.0**127, "8", None, True])
def test_a_scale_that_divides_nothing_is_refused_before_the_first_write(scale: Any) -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    managed = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(1.0), _Returning(scale))
    error = ValueError if isinstance(scale, float) else TypeError
    for call in (managed.minimize, managed.compute_gradients):
        with pytest.raises(error, match=r"_Returning.get_loss_scale\(\) must be"):
            call(lambda: w.sum(), var_list=[w])
    given, optimizer = [(np.ones(2, np.float32), w)], make()
    if scale is not None:
        with pytest.raises(error, match=r"^loss_scale must be"):
            optimizer.apply_gradients(given, loss_scale=scale)
    assert w.numpy().tolist() == [1, 1]
    assert (managed.num_skipped, optimizer.num_skipped) == (0, 0)


@pytest.mark.parametrize("kind", [int, np.asarray, Variable])
def test_a_scale_may_be_any_number(kind: Callable[[int], Any]) -> None:
    w, scale = Variable(np.ones(2, np.float32), name="w"), kind(8)
    optimizer = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(1.0), _Returning(scale))
    optimizer.minimize(lambda: w.sum(), var_list=[w])
    optimizer.apply_gradients([(np.full(2, 8, np.float32), w)], loss_scale=scale)
    assert w.numpy().tolist() == [-1, -1]


@pytest.mark.contract
def test_a_manager_is_shown_by_what_is_around_it() -> None:
    scaling = make(accept_after=7)
    scaling.apply_gradients([(np.float32([np.inf]), Variable([1.0]))])
    assert f"loss_scale_manager={scaling.manager!r}, accept_after=7" in repr(scaling)
    outer = gpuopt.GradientAccumulationOptimizer(scaling, 3, "sum", on_nonfinite="skip")
    assert repr(scaling) in repr(outer)
    assert "accumulation_steps=3, reduction='sum', on_nonfinite='skip'" in repr(outer)


def test_a_manager_stays() -> None:
    optimizer = make()
    with pytest.raises(AttributeError):
        optimizer.manager = gpuopt.FixedLossScaleManager(8)  # type: ignore[misc]
    assert isinstance(optimizer.manager, gpuopt.DynamicLossScale)


@on_each_device
@pytest.mark.parametrize(("accept_after", "reads"), [(1, True), (2, True), (2, False)])
def test_a_step_is_made_after_so_many_that_were_skipped(
    accept_after: int, reads: bool, device: str, every_schedule: str
) -> None:
    w, step = Variable([1.0], name="w", device=device), Variable(0, name="step")
    optimizer = make("fixed", gpuopt.GradientDescentOptimizer(0.5), accept_after=accept_after)
    bad, good = (to_device(np.float32([each]), w.device) for each in (-np.inf, 1))
    value, num_made, num_skipped, in_a_row = 1.0, 0, 0, 0
    for gradient in (bad, good, bad, bad, bad, bad, good):
        optimizer.apply_gradients([(gradient, w)], step)
        if gradient is bad and in_a_row < accept_after:
            num_skipped, in_a_row = num_skipped + 1, in_a_row + 1
        else:
            value, num_made = value + (np.inf if gradient is bad else -0.5), num_made + 1
            in_a_row = in_a_row if gradient is bad else 0
        if reads:
            found = float(w.numpy()[0]), int(step), optimizer.skipped_in_a_row
            assert found == (value, num_made, in_a_row)
    assert (float(w.numpy()[0]), int(step)) == (np.inf, num_made)
    assert (optimizer.num_skipped, optimizer.skipped_in_a_row) == (num_skipped, 0)


class _HookMomentum(gpuopt.MomentumOptimizer):
    def _apply_dense(self, grad: Any, var: Any) -> None:
        super()._apply_dense(grad, var)


def test_an_optimizer_of_hooks_gets_unscaled_gradients() -> None:
    w, step = Variable([1.0, 2.0], name="w"), Variable(0, name="step")
    optimizer = make("fixed", _HookMomentum(0.5, 0.5))
    gradient = np.float32([1024, -2048])
    optimizer.apply_gradients([(gradient, w)], step, loss_scale=1024)
    np.testing.assert_array_equal(w.numpy(), np.float32([0.5, 3]))
    optimizer.apply_gradients([(np.float32([np.nan, 1]), w)], step, loss_scale=1024)
    np.testing.assert_array_equal(w.numpy(), np.float32([0.5, 3]))
    assert gradient.tolist() == [1024, -2048]
    assert (int(step), optimizer.num_skipped) == (1, 1)


class _Users(gpuopt.LossScaleManager):
    def __init__(self) -> None:
        self.seen: list[bool] = []

    def get_loss_scale(self) -> float:
        return 2.0 + len(self.seen)

    def update_loss_scale(self, finite_grads: Any) -> None:
        self.seen.append(finite_grads)


def test_a_manager_of_a_users_own_hears_of_each_step() -> None:
    w, manager = Variable([1.0], name="w"), _Users()
    optimizer = LossScaleOptimizer(gpuopt.GradientDescentOptimizer(1.0), manager)
    for factor in (1, np.inf, 2):
        scale = manager.get_loss_scale()
        optimizer.apply_gradients([(np.float32([factor * scale]), w)], loss_scale=scale)
    assert manager.seen == [True, False, True]
    assert w.numpy().tolist() == [-2]
    assert set(optimizer.state_dict()["non_slots"]) == {"num_skipped", "skipped_in_a_row"}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("make_wrong", "error", "message"),
    [
        (lambda: gpuopt.FixedLossScaleManager(0.5), ValueError, "loss_scale must be at least 1"),
        (lambda: gpuopt.FixedLossScaleManager(np.inf), ValueError, "loss_scale must be at least 1"),
        (lambda: gpuopt.FixedLossScaleManager(1e39), ValueError, "finite in float32, got 1e"),
        (lambda: gpuopt.DynamicLossScale(2.0**127), ValueError, r"at most 2\*\*126"),
        (lambda: gpuopt.FixedLossScaleManager("8"), TypeError, "loss_scale must be a number"),
        (
            lambda: gpuopt.ExponentialUpdateLossScaleManager(0.9, 2),
            ValueError,
            "init_loss_scale must be at least 1",
        ),
        (
            lambda: gpuopt.ExponentialUpdateLossScaleManager(2, 0),
            ValueError,
            "incr_every_n_steps must be at least 1, got 0",
        ),
        (
            lambda: gpuopt.ExponentialUpdateLossScaleManager(2, 2, 1.5),
            TypeError,
            "decr_every_n_nan_or_inf must be a whole number",
        ),
        (
            lambda: gpuopt.ExponentialUpdateLossScaleManager(2, 2, incr_ratio=1),
            ValueError,
            "incr_ratio must be above 1",
        ),
        (
            lambda: gpuopt.ExponentialUpdateLossScaleManager(2, 2, decr_ratio=1.0),
            ValueError,
            "decr_ratio must be between 0 and 1",
        ),
        (
            lambda: gpuopt.DynamicLossScale(2, 2, np.nan),
            ValueError,
            "multiplier must be above 1",
        ),
        (lambda: gpuopt.DynamicLossScale(2, True), ValueError, "increment_period must be at least"),
        (
            lambda: LossScaleOptimizer(gpuopt.AdamOptimizer(), 8.0),
            TypeError,
            r"loss_scale_manager must be a LossScaleManager, got 8.0: as FixedLossScaleManager\(",
        ),
        (lambda: LossScaleOptimizer(3, MANAGERS["fixed"]()), TypeError, "must be an Optimizer"),
        (lambda: make(accept_after=-1), ValueError, "accept_after must be from 1, or None"),
        (lambda: make(accept_after=0), ValueError, "accept_after must be from 1, or None"),
        (lambda: make(accept_after=0.5), TypeError, "accept_after must be a whole number or None"),
        (lambda: make(accept_after=True), TypeError, "accept_after must be a whole number or None"),
        (lambda: make(accept_after=2**63), ValueError, r"accept_after must be less than 2\*\*63"),
        (lambda: make(opt=make()), ValueError, "cannot be around another one"),
        (
            lambda: make(opt=gpuopt.AdamOptimizer(on_nonfinite="skip")),
            ValueError,
            'on_nonfinite="skip" of AdamOptimizer and LossScaleOptimizer both',
        ),
        (
            lambda: make(opt=gpuopt.TowerOptimizer(gpuopt.AdamOptimizer())),
            ValueError,
            r"write TowerOptimizer\(LossScaleOptimizer\(\.\.\.\)",
        ),
        (
            lambda: make(opt=gpuopt.SyncReplicasOptimizer(gpuopt.AdamOptimizer(), 1)),
            ValueError,
            r"write SyncReplicasOptimizer\(LossScaleOptimizer\(\.\.\.\)",
        ),
    ],
)
def test_bad_values_are_refused_by_name(make_wrong: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_wrong()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loss_scale", 0.5),
        ("loss_scale", np.nan),
        ("loss_scale", 2.0**127),
        ("good_steps", -1),
        ("num_skipped", -1),
    ],
)
def test_a_state_that_no_run_makes_is_refused(name: str, value: float) -> None:
    w = Variable([1.0], name="w")
    optimizer = make()
    optimizer.apply_gradients([(np.float32([1]), w)])
    state: Any = optimizer.state_dict()
    wrong = {**state["non_slots"], name: np.array(value, state["non_slots"][name].dtype)}
    with pytest.raises(ValueError, match=f'"{name}" must be a number'):
        optimizer.load_state_dict({**state, "non_slots": wrong})
    del state["non_slots"][name]
    with pytest.raises(ValueError, match=f'has no "{name}": it was saved without'):
        optimizer.load_state_dict(state)


@pytest.mark.contract
def test_workers_that_meet_are_refused_around_a_loss_scale() -> None:
    getter = gpuopt.AGNCustomGetter()
    v = getter.variable([0.0, 3.0], name="v")
    optimizer = gpuopt.AGNOptimizer(make(), 1, getter, communication_period=2)
    with pytest.raises(RuntimeError, match="AGNOptimizer cannot be around LossScaleOptimizer"):
        optimizer.apply_gradients([(np.float32([1, 2]), v)])
    assert v.numpy().tolist() == [0, 3]


def test_all_gradients_are_needed_at_once() -> None:
    w = Variable([1.0, 2.0], name="w")
    optimizer = make()
    with pytest.warns(UserWarning, match="GATE_NONE gives way to GATE_OP"):
        optimizer.minimize(
            lambda: np.sum(w.value() ** 2), var_list=[w], gate_gradients=optimizer.GATE_NONE
        )


def test_gradients_that_are_asked_for_are_divided_by_the_scale() -> None:
    w = Variable([1.0, 2.0], name="w")
    optimizer = make("fixed")
    [(gradient, _)] = optimizer.compute_gradients(lambda: np.sum(w.value() ** 2), [w])
    assert gradient.tolist() == [2, 4]
    given = optimizer.compute_gradients(lambda: w.value() ** 2, [w], grad_loss=np.float32([0.5, 1]))
    assert given[0][0].tolist() == [1, 4]


def test_small_gradients_of_16_bits_do_not_vanish() -> None:
    w = Variable(np.ones(2, np.float16), name="w")
    losses = [lambda: np.sum(w.value() * np.float16(2**-14)) * np.float16(2**-12)]
    plain, scaled = (
        gpuopt.GradientDescentOptimizer(2.0**18),
        make(opt=gpuopt.GradientDescentOptimizer(2.0**18)),
    )
    plain.minimize(losses[0], var_list=[w])
    assert w.numpy().tolist() == [1, 1]
    scaled.manager.variables["loss_scale"].assign(2.0**10)
    scaled.minimize(losses[0], var_list=[w])
    np.testing.assert_array_equal(w.numpy(), np.float16(1 - 2.0**-8))


def _step_in_a_strategy(optimizer: Any, start: Any, loss_of: Any) -> Any:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(start, name="w")

    def train() -> None:
        mine = w.replicas[replica_context().replica_id]
        optimizer.minimize(loss_of(mine), var_list=[mine])

    strategy.run(train)
    return w.numpy()


def _step_of_towers(optimizer: Any, start: Any, loss_of: Any) -> Any:
    w, tower = Variable(start, name="w"), gpuopt.TowerOptimizer(optimizer)

    def model(batch: Any) -> None:
        tower.minimize(loss_of(w), var_list=[w])

    gpuopt.replicate(model, devices=["cpu", "cpu"])(np.zeros(2))
    return w.numpy()


def _step_of_a_worker(optimizer: Any, start: Any, loss_of: Any) -> Any:
    w, step = Variable(start, name="w"), Variable(0, name="step")
    sync = gpuopt.SyncReplicasOptimizer(optimizer, 2, 2)
    with sync.start(step, num_tokens=0), sync.worker(0) as one, sync.worker(1) as other:
        thread = threading.Thread(target=lambda: one.minimize(loss_of(w), step, [w]))
        thread.start()
        # By hand, in the variable's own type.
        gradients = optimizer.compute_gradients(loss_of(w), [w])
        other.apply_gradients([(gradients[0][0], w)], step)
        thread.join()
    return w.numpy()


def _step_by(wrap: Callable[[Any], Any], num_calls: int = 1) -> Callable[..., Any]:
    def step(optimizer: Any, start: Any, loss_of: Any) -> Any:
        w, outer = Variable(start, name="w"), wrap(optimizer)
        for _ in range(num_calls):
            outer.minimize(loss_of(w), var_list=[w])
        return w.numpy()

    return step


def _step_by_hand(optimizer: Any, start: Any, loss_of: Any) -> Any:
    w = Variable(start, name="w")
    pairs, _ = gpuopt.clip_gradients_by_global_norm(
        optimizer.compute_gradients(loss_of(w), [w]), 1.0
    )
    assert pairs[0][0].dtype == np.float32
    optimizer.apply_gradients(pairs)
    return w.numpy()


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (_step_by(lambda optimizer: optimizer), "sparse"),
        (_step_by_hand, "dense"),
        (
            _step_by(lambda optimizer: gpuopt.GradientAccumulationOptimizer(optimizer, 2), 2),
            "dense",
        ),
        (
            _step_by(lambda optimizer: gpuopt.GradientAccumulationOptimizer(optimizer, 2), 2),
            "sparse",
        ),
        (_step_by(gpuopt.MovingAverageOptimizer), "dense"),
        (_step_in_a_strategy, "sparse"),
        (_step_of_towers, "dense"),
        (_step_of_a_worker, "sparse"),
    ],
)
def test_gradients_of_16_bits_do_not_vanish_again_where_wrappers_are_around(
    step: Callable[..., Any], kind: str
) -> None:
    def loss_of(w: Variable) -> Callable[[], Any]:
        def loss() -> Any:
            read = w.value() if kind == "dense" else gpuopt.embedding_lookup(w, np.array([0, 2]))
            return (read.astype(np.float32) * np.float32(2.0**-31)).sum()

        return loss

    inside = gpuopt.GradientDescentOptimizer(2.0**30, masters="float32")
    optimizer = LossScaleOptimizer(inside, gpuopt.FixedLossScaleManager(2.0**12))
    found = step(optimizer, np.zeros((3, 2), np.float16), loss_of)
    expected = np.array([[-0.5], [-0.5 if kind == "dense" else 0], [-0.5]]) * np.ones(2)
    np.testing.assert_array_equal(found / found.min() / -2, expected)
    assert found.min() in (-0.5, -1)  # a strategy adds up


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu", "cpu"],
        pytest.param(["gpu:0", "gpu:1"], marks=[pytest.mark.gpu, pytest.mark.gpus(2)]),
    ],
    ids="+".join,
)
@pytest.mark.parametrize(
    ("manager", "clip", "scale"),
    [("exponential", {"clip_norm": 10.0}, 8), ("dynamic", {}, np.float32(4) / np.float32(2.5))],
    ids=["exponential", "dynamic"],
)
def test_replicas_decide_about_their_sum_and_alike(
    manager: str, clip: Any, scale: float, devices: list[str], every_schedule: str
) -> None:
    strategy = gpuopt.MirroredStrategy(devices)
    w, step = strategy.variable(np.float32([1, 2]), name="w"), Variable(0, name="step")
    optimizer = make(manager, gpuopt.GradientDescentOptimizer(0.5, **clip))
    for bad in (1.0, np.inf, 1.0):

        def train() -> None:
            # One of the two overflows. The loss is averaged.
            factor = bad if replica_context().replica_id else 1  # noqa: B023
            gradient = to_device(np.float32([8, 8]) * np.float32(factor), w.local.device)
            optimizer.apply_gradients([(gradient, w)], step, loss_scale=16)

        strategy.run(train)
    for copy in w.replicas:
        assert copy.numpy().tolist() == [0, 1]
    assert (int(step), optimizer.num_skipped, optimizer.loss_scale) == (2, 1, scale)


def test_the_loss_of_each_replica_is_scaled() -> None:
    strategy = gpuopt.MirroredStrategy(["cpu", "cpu"])
    w = strategy.variable(np.float32([1, 2]), name="w")
    optimizer = make("fixed", gpuopt.GradientDescentOptimizer(0.5))

    def train() -> None:
        mine = w.replicas[replica_context().replica_id]
        optimizer.minimize(lambda: np.sum(mine.value() * 2), var_list=[mine])

    strategy.run(train)
    for copy in w.replicas:
        assert copy.numpy().tolist() == [0, 1]


def after_two_steps(device: str) -> tuple[LossScaleOptimizer, Variable, Variable]:
    """Makes a step and skips one; returns (optimizer, w, step), which the host has not read."""
    w, step = Variable(np.zeros(5, np.float32), name="w", device=device), Variable(0, name="step")
    inside = gpuopt.MomentumOptimizer(1.0, 0.5)
    optimizer = LossScaleOptimizer(inside, gpuopt.DynamicLossScale(64.0, 100))
    for value in (1, np.nan):
        optimizer.apply_gradients([(to_device(np.full(5, value, np.float32), w.device), w)], step)
    return optimizer, w, step


@on_each_device
def test_towers_decide_about_what_all_bring(device: str, every_schedule: str) -> None:
    optimizer, w, step = after_two_steps(device)
    tower = gpuopt.TowerOptimizer(optimizer)

    def model(factor: Any) -> Any:
        tower.minimize(lambda: (w.value() * factor[0]).sum(), step, [w])
        return factor[0]

    train = gpuopt.replicate(model, "weighted_sum", devices=[device, device])
    for bad in (1.0, np.inf, 1.0):
        train(to_device(np.float32([1, bad]), w.device))
    assert (int(step), optimizer.num_skipped, optimizer.loss_scale) == (3, 2, 16)
    np.testing.assert_array_equal(w.numpy(), np.float32([-1 - 2.5 - 3.25] * 5))


@on_each_device
def test_workers_go_on_after_a_step_that_was_skipped(device: str, every_schedule: str) -> None:
    optimizer, w, step = after_two_steps(device)
    sync = gpuopt.SyncReplicasOptimizer(optimizer, 1, 1)
    with sync.start(step, num_tokens=0), sync.worker(0) as worker:
        for value in (1, np.inf, 1):
            gradient = to_device(np.full(5, value, np.float32), w.device)
            worker.apply_gradients([(gradient, w)], step)
    assert (int(step), optimizer.num_skipped, optimizer.loss_scale) == (3, 2, 16)
    np.testing.assert_array_equal(w.numpy(), np.float32([-1 - 1.5 - 1.75] * 5))


@pytest.mark.parametrize("around", [False, True])
def test_a_saver_of_some_optimizers_has_their_scales(around: bool, tmp_path: Path) -> None:
    w = Variable(np.zeros(2, np.float32), name="w")
    manager = gpuopt.DynamicLossScale(1024.0, increment_period=2)
    scaling = LossScaleOptimizer(gpuopt.AdamOptimizer(), manager)
    outer = gpuopt.GradientAccumulationOptimizer(scaling, 1) if around else scaling
    saver = gpuopt.Saver({"weight": w}, optimizers=[outer])
    for bad in (1, 1, np.inf, 1, 1):
        scaling.apply_gradients([(np.full(2, bad, np.float32), w)])
    before = scaling.loss_scale, scaling.num_skipped
    path = saver.save(tmp_path / "model")
    scaling.apply_gradients([(np.full(2, np.nan, np.float32), w)])
    saver.restore(path)
    assert (scaling.loss_scale, scaling.num_skipped) == before == (2048.0, 1)


@pytest.mark.internal
def test_an_interrupted_change_of_the_scale_is_made_or_not() -> None:
    for interrupt in each_moment(["gpuopt/"], least=20):
        manager = gpuopt.DynamicLossScale(4.0, 2)
        manager.update_loss_scale(True)
        before = [float(each.numpy()) for each in manager.variables.values()]
        with suppress(Interrupt), interrupt:
            manager.update_loss_scale(True)
        after = [float(each.numpy()) for each in manager.variables.values()]
        assert after in (before, [8.0, 0.0, 0.0])
