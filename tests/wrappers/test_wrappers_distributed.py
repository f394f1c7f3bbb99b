"""Wrappers inside and around SyncReplicasOptimizer and MirroredStrategy.

tests/wrappers/test_nestings.py has each in and around each, with towers, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sync_training import Training

import gpuopt
from gpuopt import IndexedSlices, MirroredStrategy, SyncReplicasOptimizer, Variable
from gpuopt.step.replica_context import replica_context

pytestmark = pytest.mark.value

Wrap = Callable[[gpuopt.Optimizer], gpuopt.Optimizer]


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def momentum() -> gpuopt.Optimizer:
    return gpuopt.MomentumOptimizer(1.0, 0.5)


def average(opt: gpuopt.Optimizer) -> gpuopt.MovingAverageOptimizer:
    return gpuopt.MovingAverageOptimizer(opt, 0.5)


def nested(order: str, outer: Wrap, wrap: Wrap) -> tuple[Any, Any]:
    """Returns the whole, and the wrapper, which is around `outer` or inside of it."""
    if order == "inside":
        wrapper = wrap(momentum())
        return outer(wrapper), wrapper
    wrapper = wrap(outer(momentum()))
    return wrapper, wrapper


@pytest.mark.parametrize("order", ["inside", "around"])
def test_averages_move_once_in_a_step_of_several_workers(order: str) -> None:
    w = Variable(np.zeros(2, np.float32), name="w")
    step = Variable(0, name="step", trainable=False, dtype=np.int64)
    made: list[Any] = []

    def sync(opt: gpuopt.Optimizer) -> gpuopt.Optimizer:
        made.append(SyncReplicasOptimizer(opt, 2))
        return made[0]

    whole, wrapper = nested(order, sync, average)

    def train(worker: Any) -> None:
        for _ in range(3):
            whole.apply_gradients([(-np.ones(2, np.float32), w)], global_step=step)

    made[0].run(train, step, token_policy="per_step")
    assert int(step) == 3
    # The weight is 1, 2.5, 4.25; its average 0.5, 1.5, 2.875.
    assert w.numpy().tolist() == [4.25, 4.25]
    assert wrapper.averages.average(w).numpy().tolist() == [2.875, 2.875]


def test_a_mean_of_zero_leaves_its_variable_alone() -> None:
    training = Training(2, 2, optimizer=gpuopt.MultitaskOptimizerWrapper(momentum()), num_tokens=0)
    for number, gradients in enumerate([(1.0, 1.0), (1.0, -1.0)]):
        for worker, gradient in enumerate(gradients):
            pairs = [(np.full(2, gradient, np.float32), training.w)]
            training.coordinator.push(worker, number, pairs)
    assert int(training.step) == 2
    assert training.w.numpy().tolist() == [-1, -1]
    training.coordinator.close()


@pytest.mark.parametrize("order", ["inside", "around"])
def test_rows_of_all_workers_are_clipped(order: str) -> None:
    w = Variable(np.full((3, 1), 10, np.float32), name="w")
    step = Variable(0, name="step", trainable=False, dtype=np.int64)
    made: list[Any] = []

    def sync(opt: gpuopt.Optimizer) -> gpuopt.Optimizer:
        made.append(SyncReplicasOptimizer(opt, 2))
        return made[0]

    whole, _ = nested(order, sync, lambda opt: gpuopt.VariableClippingOptimizer(opt, {w: [1]}, 2.0))

    def train(worker: Any) -> None:
        rows = IndexedSlices(np.zeros((1, 1), np.float32), np.array([worker.index]))
        whole.apply_gradients([(rows, w)], global_step=step)

    made[0].run(train, step, token_policy="per_step")
    assert w.numpy().ravel().tolist() == [2, 2, 10]


def test_a_wrapper_without_a_tower_optimizer_is_refused_in_towers() -> None:
    w, optimizer = Variable([0.0, 0.0]), average(sgd())
    step = gpuopt.replicate(
        lambda x: optimizer.apply_gradients([(x[0], w)]), "weighted_sum", ["cpu", "cpu"]
    )
    with pytest.raises(ValueError, match="Please wrap optimizers with TowerOptimizer"):
        step(np.ones((2, 2), np.float32))
    assert [variable.name for variable in gpuopt.global_variables()] == [w.name]


def test_every_copy_of_a_mirrored_variable_is_averaged_and_clipped() -> None:
    strategy = MirroredStrategy(["cpu", "cpu"])
    w, idle = strategy.variable(np.zeros(4), name="w"), strategy.variable([9.0], name="idle")
    step = Variable(0, name="step", trainable=False, dtype=np.int64)
    averages = gpuopt.MovingAverageOptimizer(gpuopt.MultitaskOptimizerWrapper(momentum()), 0.5)
    optimizer = gpuopt.VariableClippingOptimizer(averages, {w: [0], idle: [0]}, 3.0)

    def train() -> None:
        sign = 1.0 if replica_context().replica_id else -1.0
        pairs = [(-np.ones(4), w), (np.float32([sign]), idle)]
        optimizer.apply_gradients(pairs, global_step=step)

    strategy.run(train)
    assert int(step) == 1
    for copy in w.replicas:
        np.testing.assert_allclose(copy.numpy(), 1.5, rtol=1e-6)  # 2, and then clipped
        assert averages.averages.average(copy).numpy().tolist() == [1] * 4
    for copy in idle.replicas:  # its sum was zero; it is clipped, as in TensorFlow
        assert copy.numpy().tolist() == [3]
        assert not optimizer.get_slot(copy, "momentum").numpy().any()
