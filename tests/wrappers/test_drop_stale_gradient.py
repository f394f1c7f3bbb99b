"""DropStaleGradientOptimizer: what is dropped, what is counted, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpuopt
from gpuopt import DropStaleGradientOptimizer, Variable
from gpuopt.step.replica_context import ReplicaContext, in_replica


def sgd() -> gpuopt.Optimizer:
    return gpuopt.GradientDescentOptimizer(1.0)


def new_step(value: int = 0) -> Variable:
    return Variable(value, name="global_step", trainable=False, dtype=np.int64)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_gradients_older_than_the_bound_are_dropped_and_counted(staleness: int) -> None:
    w, step = Variable(np.zeros(2), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), staleness)
    rng = np.random.default_rng(0)
    expected, count, dropped = np.zeros(2), 0, 0
    for _ in range(30):
        gradient, behind = rng.standard_normal(2), int(rng.integers(0, 5))
        optimizer.apply_gradients([(gradient, w)], step, local_step=count - behind)
        if behind > staleness:
            dropped += 1
        else:
            expected, count = expected - gradient, count + 1
        assert (int(step), float(optimizer.stale_counter)) == (count, dropped)
        np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)
    assert count
    assert dropped


@pytest.mark.parametrize("by", ["minimize", "compute_gradients"])
def test_the_step_is_read_before_the_loss(by: str) -> None:
    w, step = Variable(np.ones(2), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 1, global_step=step)
    steps_of_others = iter([1, 2])

    def loss() -> Any:
        step.assign_add(next(steps_of_others))
        return w.sum()

    for _ in range(2):
        if by == "minimize":
            optimizer.minimize(loss, step, [w])
        else:
            optimizer.apply_gradients(optimizer.compute_gradients(loss, [w]), step)
    assert w.numpy().tolist() == [0, 0]
    assert (int(step), float(optimizer.stale_counter)) == (1 + 1 + 2, 1)


def test_each_thread_has_a_step_of_its_own() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 0)
    turns = threading.Barrier(2, timeout=20)

    def train(rank: int) -> None:
        def loss() -> Any:
            turns.wait()  # both have read step 0
            return -w.sum()

        optimizer.minimize(loss, step, [w])

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (w.numpy().tolist(), int(step), float(optimizer.stale_counter)) == ([1], 1, 1)


def test_the_bound_holds_for_every_update_of_many_threads() -> None:
    w, step = Variable(np.zeros(4), name="w"), new_step()
    seen: list[tuple[int, int]] = []
    local, never = threading.local(), threading.Event()

    class Slow(gpuopt.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, *rest: Any) -> None:
            never.wait(0.02)  # other threads would come by now, if they could
            seen.append((local.step, int(global_step)))
            super().apply_gradients(grads_and_vars, global_step, *rest)

    optimizer = DropStaleGradientOptimizer(Slow(1.0), 1)

    def train() -> None:
        for _ in range(5):
            local.step = int(step)
            turns.wait()
            optimizer.apply_gradients([(-np.ones(4), w)], step, local_step=local.step)
            turns.wait()

    turns = threading.Barrier(4, timeout=20)
    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(applied - computed <= 1 for computed, applied in seen)
    # Of four gradients for one step, two are in time.
    assert (len(seen), int(step), float(optimizer.stale_counter)) == (10, 10, 10)
    assert w.numpy().tolist() == [10] * 4


def test_the_counter_is_in_a_checkpoint(tmp_path: Path) -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step(5)
    optimizer = DropStaleGradientOptimizer(sgd(), 0)
    optimizer.apply_gradients([(np.ones(1), w)], step, local_step=0)
    assert optimizer.stale_counter.name == "stale_counter"
    path = gpuopt.Saver().save(tmp_path / "model")
    optimizer.apply_gradients([(np.ones(1), w)], step, local_step=0)
    gpuopt.Saver().restore(path)
    assert (float(optimizer.stale_counter), int(step)) == (1, 5)


def test_slots_are_those_of_the_optimizer_inside() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    inside = gpuopt.MomentumOptimizer(1.0, 0.5)
    optimizer = DropStaleGradientOptimizer(inside, 0, global_step=step)
    optimizer.apply_gradients([(np.ones(1), w)], local_step=0)
    assert optimizer.get_slot(w, "momentum") is inside.get_slot(w, "momentum") is not None
    assert (optimizer.get_slot_names(), optimizer.get_name()) == (["momentum"], "DropStaleGradient")


def test_what_it_cannot_know_is_asked_for_by_name() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 1)
    pairs = [(np.ones(1), w)]
    with pytest.raises(ValueError, match="Global step is required to check staleness"):
        optimizer.apply_gradients(pairs, local_step=0)
    with pytest.raises(ValueError, match="Global step is required to check staleness"):
        optimizer.compute_gradients(lambda: w.sum(), [w])
    with pytest.raises(ValueError, match="Global step is required to check staleness"):
        optimizer.minimize(lambda: w.sum(), None, [w])
    with pytest.raises(ValueError, match="does not know at which step these gradients were comp"):
        optimizer.apply_gradients(pairs, step)
    with pytest.raises(TypeError, match='global_step "floating" must be an integer'):
        optimizer.apply_gradients(pairs, Variable(0.0, name="floating"), local_step=0)
    with pytest.raises(TypeError, match=r"staleness must be an integer, got 1\.5"):
        DropStaleGradientOptimizer(sgd(), 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the optimizer to wrap must be an Optimizer, got None"):
        DropStaleGradientOptimizer(None, 1)  # type: ignore[arg-type]
    with in_replica(ReplicaContext(0, 2)), pytest.raises(RuntimeError, match="in a replica"):
        optimizer.apply_gradients(pairs, step, local_step=0)
    assert (w.numpy().tolist(), int(step), float(optimizer.stale_counter)) == ([0], 0, 0)


def test_bad_gradients_are_refused_and_do_not_count_as_stale() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 1)
    with pytest.raises(ValueError, match='gradient for "w" has shape'):
        optimizer.apply_gradients([(np.ones(2), w)], step, local_step=0)
    assert (w.numpy().tolist(), int(step), float(optimizer.stale_counter)) == ([0], 0, 0)
