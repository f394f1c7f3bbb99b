"""What wrappers ask of a step reaches the step of the optimizer inside, and no other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gpuopt
from gpuopt import (
    FixedLossScaleManager,
    LossScaleOptimizer,
    MovingAverageOptimizer,
    SyncReplicasOptimizer,
    Variable,
)

ONES = np.ones(2, np.float32)


def halving(base: type[gpuopt.Optimizer], wraps: bool) -> Any:
    """Returns a class whose `apply_gradients` has TensorFlow's face, and passes on other pairs."""

    def apply_gradients(self: Any, grads_and_vars: Any, global_step: Any = None, name: Any = None):
        pairs = [(gradient * np.float32(0.5), variable) for gradient, variable in grads_and_vars]
        base.apply_gradients(self, pairs, global_step, name)

    if wraps:
        apply_gradients = functools.wraps(base.apply_gradients)(apply_gradients)
    return type("Halving", (base,), {"apply_gradients": apply_gradients})


@pytest.mark.parametrize("wraps", [False, True])
def test_what_is_added_gets_through_an_apply_gradients_that_passes_on_other_pairs(
    wraps: bool,
) -> None:
    inner = halving(gpuopt.GradientDescentOptimizer, wraps)(1.0)
    averaged = MovingAverageOptimizer(inner, 0.5)
    optimizer = LossScaleOptimizer(averaged, FixedLossScaleManager(8.0))
    w, step = Variable(np.zeros(2, np.float32)), Variable(0, trainable=False)
    optimizer.apply_gradients([(8 * ONES, w)], step, loss_scale=8.0)
    assert w.numpy().tolist() == [-0.5, -0.5]
    assert averaged.averages.average(w).numpy().tolist() == [-0.25, -0.25]
    optimizer.apply_gradients([(ONES * np.float32(np.nan), w)], step, loss_scale=8.0)
    assert (int(step), optimizer.num_skipped) == (1, 1)
    assert w.numpy().tolist() == [-0.5, -0.5]


def test_a_method_that_is_set_on_the_optimizer_inside_is_called() -> None:
    inner = gpuopt.GradientDescentOptimizer(1.0)
    apply, seen = inner.apply_gradients, []

    def looking(grads_and_vars: Any, *arguments: Any, **more: Any) -> None:
        seen.append(grads_and_vars)
        apply(grads_and_vars, *arguments, **more)

    inner.apply_gradients = looking  # type: ignore[method-assign]
    optimizer, w = MovingAverageOptimizer(inner, 0.5), Variable(np.zeros(2, np.float32))
    optimizer.apply_gradients([(ONES, w)])
    assert len(seen) == 1
    assert optimizer.averages.average(w).numpy().tolist() == [-0.5, -0.5]


def test_a_method_of_another_optimizer_that_is_set_on_the_one_inside_is_called() -> None:
    inner, other = gpuopt.GradientDescentOptimizer(1.0), gpuopt.GradientDescentOptimizer(2.0)
    inner.apply_gradients = other.apply_gradients  # type: ignore[method-assign]
    optimizer, w = MovingAverageOptimizer(inner, 0.5), Variable(np.zeros(2, np.float32))
    optimizer.apply_gradients([(ONES, w)])
    assert w.numpy().tolist() == [-2, -2]
    assert optimizer.averages.average(w).numpy().tolist() == [-1, -1]


def test_what_is_added_gets_through_a_wrapper_that_nobody_knows_to_be_one() -> None:
    class Wrapping(gpuopt.Optimizer):
        def __init__(self, opt: gpuopt.Optimizer) -> None:
            super().__init__(False, "Wrapping")
            self.opt = opt

        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: Any = None):
            self.opt.apply_gradients(grads_and_vars, global_step, name)

    optimizer = MovingAverageOptimizer(Wrapping(gpuopt.GradientDescentOptimizer(1.0)), 0.5)
    w = Variable(np.zeros(2, np.float32))
    optimizer.apply_gradients([(ONES, w)])
    assert optimizer.averages.average(w).numpy().tolist() == [-0.5, -0.5]


def test_another_optimizer_that_a_users_wrapper_steps_is_not_added_to() -> None:
    other, elsewhere = gpuopt.GradientDescentOptimizer(1.0), Variable(np.zeros(2, np.float32))

    class SteppingAnother(MovingAverageOptimizer):
        def apply_gradients(self, *arguments: Any, **more: Any) -> None:
            other.apply_gradients([(ONES, elsewhere)])
            super().apply_gradients(*arguments, **more)

    inner = SteppingAnother(gpuopt.GradientDescentOptimizer(1.0), 0.25)
    optimizer, w = MovingAverageOptimizer(inner, 0.5), Variable(np.zeros(2, np.float32))
    optimizer.apply_gradients([(ONES, w)])
    assert elsewhere.numpy().tolist() == w.numpy().tolist() == [-1, -1]
    for averages, value in ((inner.averages, -0.75), (optimizer.averages, -0.5)):
        assert averages.average(w).numpy().tolist() == [value, value]
        assert averages.average(elsewhere) is None


def test_another_optimizer_that_a_users_apply_gradients_steps_takes_no_wide_gradients() -> None:
    other, refused = gpuopt.GradientDescentOptimizer(1.0), []
    elsewhere = Variable(np.zeros(2, ml_dtypes.bfloat16))

    class SteppingAnother(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **more: Any) -> None:
            with pytest.raises(TypeError, match="dtype float32") as error:
                other.apply_gradients([(ONES, elsewhere)])
            refused.append(error)
            super().apply_gradients(grads_and_vars, *arguments, **more)

    optimizer = LossScaleOptimizer(SteppingAnother(1.0), FixedLossScaleManager(8.0))
    w = Variable(np.zeros(2, ml_dtypes.bfloat16))
    optimizer.apply_gradients([(ONES, w)])
    assert len(refused) == 1
    assert w.numpy().astype(np.float32).tolist() == [-1, -1]
    assert elsewhere.numpy().astype(np.float32).tolist() == [0, 0]


@pytest.mark.parametrize("is_overridden", [False, True])
def test_a_step_that_reading_the_pairs_makes_takes_nothing_of_the_outer_one(
    is_overridden: bool,
) -> None:
    cls = gpuopt.GradientDescentOptimizer
    inner = (halving(cls, wraps=False) if is_overridden else cls)(1.0)
    elsewhere, w = (Variable(np.zeros(2, np.float32)) for _ in range(2))

    def pairs() -> Iterator[tuple[Any, Variable]]:
        inner.apply_gradients([(ONES, elsewhere)])
        yield ONES, w

    optimizer = MovingAverageOptimizer(inner, 0.5)
    optimizer.apply_gradients(pairs())
    value = -0.5 if is_overridden else -1
    assert elsewhere.numpy().tolist() == w.numpy().tolist() == [value, value]
    assert optimizer.averages.average(w).numpy().tolist() == [value / 2, value / 2]
    assert optimizer.averages.average(elsewhere) is None


@pytest.mark.parametrize("is_overridden", [False, True])
def test_a_step_that_a_hyperparameter_makes_takes_nothing_of_the_outer_one(
    is_overridden: bool,
) -> None:
    elsewhere, w = (Variable(np.zeros(2, np.float32)) for _ in range(2))
    rates = [1.0]

    def rate() -> float:
        if rates:
            rates.clear()
            inner.apply_gradients([(ONES, elsewhere)])
        return 1.0

    cls = gpuopt.GradientDescentOptimizer
    inner = (halving(cls, wraps=False) if is_overridden else cls)(rate)
    optimizer = MovingAverageOptimizer(inner, 0.5)
    optimizer.apply_gradients([(ONES, w)])
    value = -0.5 if is_overridden else -1
    assert elsewhere.numpy().tolist() == w.numpy().tolist() == [value, value]
    assert optimizer.averages.average(w).numpy().tolist() == [value / 2, value / 2]
    assert optimizer.averages.average(elsewhere) is None


def test_a_worker_that_completes_a_step_adds_what_is_around_its_optimizer() -> None:
    w, step = Variable(np.zeros(2, np.float32)), Variable(0, trainable=False)
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    optimizer = MovingAverageOptimizer(sync, 0.5)
    with sync.start(step), sync.worker(0):
        optimizer.apply_gradients([(ONES, w)], step)
    assert w.numpy().tolist() == [-1, -1]
    assert optimizer.averages.average(w).numpy().tolist() == [-0.5, -0.5]


def decaying(base: type[gpuopt.Optimizer], *arguments: Any) -> Any:
    return gpuopt.extend_with_decoupled_weight_decay(base)(0.5, *arguments)


def overridden(cls: type[gpuopt.Optimizer], method: str) -> Any:
    """Returns a subclass whose method does nothing but to call the one of `cls`."""

    def call(self: Any, *arguments: Any, **options: Any) -> None:
        getattr(cls, method)(self, *arguments, **options)

    return type("Overridden", (cls,), {method: call})


SGD = gpuopt.GradientDescentOptimizer


def users_hook(self: Any, grad: Any, var: Any) -> None:
    SGD._apply_dense(self, grad, var)


@pytest.mark.parametrize(
    "base",
    [
        SGD,
        halving(SGD, wraps=False),
        overridden(SGD, "minimize"),
        type("Hooked", (SGD,), {"_apply_dense": users_hook}),
    ],
    ids=["rule", "apply_gradients", "minimize", "hook"],
)
@pytest.mark.parametrize(
    ("is_outer", "gate"),
    [
        (False, None),
        (True, None),
        (False, gpuopt.Optimizer.GATE_NONE),
        (True, gpuopt.Optimizer.GATE_OP),
    ],
)
@pytest.mark.filterwarnings("ignore:GATE_NONE gives way")
def test_listed_variables_decay_alone_whatever_a_user_overrides(
    base: Any, is_outer: bool, gate: Any
) -> None:
    optimizer = decaying(base, 1.0)
    if is_outer:
        cls = type(optimizer)
        optimizer = overridden(overridden(cls, "apply_gradients"), "minimize")(0.5, 1.0)
    listed, other = (Variable(np.full(2, 8, np.float32)) for _ in range(2))
    if gate is None:
        optimizer.apply_gradients([(ONES, listed), (ONES, other)], decay_var_list=[listed])
    else:
        optimizer.minimize(
            lambda: np.sum(listed + other), gate_gradients=gate, decay_var_list=[listed]
        )
    rate = 0.5 if base.__name__ == "Halving" else 1.0
    assert listed.numpy().tolist() == [4 - rate] * 2
    assert other.numpy().tolist() == [8 - rate] * 2


def test_a_list_of_decaying_variables_is_for_one_step() -> None:
    listed, other, inside = (Variable(np.full(2, 8, np.float32)) for _ in range(3))
    steps = [1]

    def rate() -> float:
        if steps:
            steps.clear()
            optimizer.apply_gradients([(ONES, inside)])
        return 1.0

    optimizer = decaying(SGD, rate)
    optimizer.apply_gradients([(ONES, listed), (ONES, other)], decay_var_list=[listed])
    assert [each.numpy()[0] for each in (listed, other, inside)] == [3, 7, 3]
    optimizer.apply_gradients([(ONES, listed), (ONES, other)])
    assert [each.numpy()[0] for each in (listed, other)] == [0.5, 2.5]


def test_minimize_calls_an_apply_gradients_by_keywords_with_a_list_and_without() -> None:
    class Taking(gpuopt.extend_with_decoupled_weight_decay(SGD)):  # type: ignore[misc]
        def apply_gradients(self, pairs: Any, *, name: Any = None, global_step: Any = None) -> None:
            super().apply_gradients(pairs, global_step, name)

    optimizer, w, step = Taking(0.5, 1.0), Variable(np.full(2, 8, np.float32)), Variable(0)
    for listed in (None, [], [w]):
        optimizer.minimize(lambda: np.sum(w), step, [w], decay_var_list=listed)
    assert w.numpy().tolist() == [0, 0]  # 3, 2 and 0
    assert int(step) == 3


@pytest.mark.parametrize(
    ("is_overridden", "is_in_loss", "gate"),
    [
        (False, False, gpuopt.Optimizer.GATE_NONE),
        (False, True, gpuopt.Optimizer.GATE_OP),
        (True, False, gpuopt.Optimizer.GATE_OP),
        (True, True, gpuopt.Optimizer.GATE_NONE),
    ],
)
def test_a_list_of_decaying_variables_is_not_for_steps_inside_of_minimize(
    is_overridden: bool, is_in_loss: bool, gate: int
) -> None:
    listed, other, inside = (Variable(np.full(2, 8, np.float32)) for _ in range(3))
    steps = [1]

    def make_step_inside() -> None:
        if steps:
            steps.clear()
            optimizer.apply_gradients([(ONES, inside)])

    def rate() -> float:
        if not is_in_loss:
            make_step_inside()
        return 1.0

    def loss() -> Any:
        if is_in_loss:
            make_step_inside()
        return np.sum(listed + other)

    optimizer = decaying(overridden(SGD, "minimize") if is_overridden else SGD, rate)
    optimizer.minimize(loss, None, [listed, other], gate, decay_var_list=[listed])
    assert [each.numpy()[0] for each in (listed, other, inside)] == [3, 7, 3]
