"""DropStaleGradientOptimizer: what is dropped, what is counted, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from other_thread import in_threads
from stale_training import Training, Turns, new_order, replay
from sync_training import until

import gpuopt
from gpuopt import DropStaleGradientOptimizer, IndexedSlices, Variable
from gpuopt.distributed import StopRequest, ThreadGroup
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

    def train() -> None:
        def loss() -> Any:
            turns.wait()  # both have read step 0
            return -w.sum()

        optimizer.minimize(loss, step, [w])

    in_threads(train, train)
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
    in_threads(*[train] * 4)
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


# Workers that `run` starts, in threads.


@pytest.mark.parametrize("num_workers", [1, 2, 4])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_any_order_of_arrivals_equals_its_replay(num_workers: int, staleness: int) -> None:
    order = new_order(num_workers, seed=staleness)
    training, turns = Training(staleness), Turns(order)
    begin = threading.Barrier(num_workers, timeout=20).wait
    ended = training.optimizer.run(
        lambda worker: training.train(worker, turns, begin), training.step, num_workers
    )
    got = training.outcome(ended.figures())
    assert got == replay(num_workers, staleness, order)
    if num_workers == 4 or staleness == 0:
        assert any(stale for _, stale in got[1]) == (num_workers > 1)


def test_workers_minimize_without_waiting_for_each_other() -> None:
    w, step = Variable(np.zeros(4), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 1, global_step=step)

    def train(worker: Any) -> None:
        for each in (worker, optimizer) * 5:
            each.minimize(lambda: -w.sum(), var_list=[w])

    ended = optimizer.run(train, num_workers=3)
    accepted = sum(figures.accepted for figures in ended.figures())
    assert accepted + float(optimizer.stale_counter) == 30
    assert (int(step), w.numpy().tolist()) == (accepted, [accepted] * 4)
    assert all(figures.accepted + figures.stale == 10 for figures in ended.figures())


def test_others_go_on_without_a_worker_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 10)
    has_failed = threading.Event()

    def train(worker: Any) -> None:
        if worker.index == 0:
            has_failed.set()
            raise KeyError("lost")
        assert has_failed.wait(20)
        worker.apply_gradients([(np.ones(1), w)])

    optimizer.run(train, step, 3)
    assert int(step) == 2
    assert "worker 0 failed: KeyError('lost')" in caplog.text
    with pytest.raises(KeyError, match="lost"):
        optimizer.run(train, step, 1)


def test_a_worker_that_fails_after_the_others_have_finished_is_no_other_case(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 10)
    have_ended = threading.Semaphore(0)

    def train(worker: Any) -> None:
        if worker.index == 0:
            assert all(have_ended.acquire(timeout=20) for _ in range(2))
            coordinator = optimizer._coordinator
            assert coordinator is not None
            until(lambda: len(coordinator._left) == 2)
            raise KeyError("lost")
        worker.apply_gradients([(np.ones(1), w)])
        have_ended.release()

    optimizer.run(train, step, 3)
    assert int(step) == 2
    assert "worker 0 failed: KeyError('lost')" in caplog.text


def test_an_update_that_fails_ends_all_workers() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()

    def rate() -> float:
        raise ZeroDivisionError("no rate")

    optimizer = DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(rate), 10)

    def train(worker: Any) -> None:
        while True:
            worker.apply_gradients([(np.ones(1), w)])

    with pytest.raises(ZeroDivisionError, match="no rate"):
        optimizer.run(train, step, 3)
    assert (int(step), w.numpy().tolist()) == (0, [0])


def test_wrong_gradients_are_refused_and_the_worker_goes_on() -> None:
    table, step = Variable(np.zeros((3, 1)), name="table"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 10)

    def train(worker: Any) -> None:
        with pytest.raises(IndexError, match=r'"table": indices\[0\] = 3 is not in'):
            worker.apply_gradients([(IndexedSlices(np.ones((1, 1)), [3]), table)])
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            worker.apply_gradients([(None, table)])
        with pytest.raises(ValueError, match='global_step must be "global_step'):
            worker.apply_gradients([(np.ones((3, 1)), table)], Variable(0, "other", dtype=np.int64))
        worker.apply_gradients([(IndexedSlices(np.ones((2, 1)), [2, 2]), table)])

    [figures] = optimizer.run(train, step, 1).figures()
    assert (figures.accepted, figures.stale) == (1, 0)
    assert table.numpy().tolist() == [[0], [0], [-2]]


def test_a_request_ends_the_workers() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer, stop = DropStaleGradientOptimizer(sgd(), 10), StopRequest()

    def train(worker: Any) -> None:
        while True:
            worker.apply_gradients([(np.ones(1), w)])
            stop.has_come = True

    assert optimizer.run(train, step, 2, stop=stop).was_stopped
    assert w.numpy().tolist() == [-int(step)]


def test_rows_stay_as_they_are_while_workers_train() -> None:
    table, step = Variable(np.zeros((3, 1)), name="table"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 10)

    def train(worker: Any) -> None:
        worker.apply_gradients([(np.ones((3, 1)), table)])
        with pytest.raises(ValueError, match='rows of "table" stay as they are while workers tra'):
            gpuopt.rows(table).append(np.zeros((1, 1)))

    optimizer.run(train, step, 1)
    gpuopt.rows(table).append(np.zeros((1, 1)))
    assert table.shape == (4, 1)


def test_a_run_is_told_how_many_workers_there_are_and_is_one_at_a_time() -> None:
    w, step = Variable(np.zeros(1), name="w"), new_step()
    optimizer = DropStaleGradientOptimizer(sgd(), 10)
    errors: list[str] = []

    def train(worker: Any) -> None:
        try:
            optimizer.run(train, step, 1)
        except RuntimeError as error:
            errors.append(str(error))

    optimizer.run(train, step, 1)
    assert errors == ['"DropStaleGradient" is started already; wait for the end of its run']
    with pytest.raises(ValueError, match="needs num_workers, or a group of processes"):
        optimizer.run(train, step)
    with pytest.raises(ValueError, match="needs at least 1 worker, got 0"):
        optimizer.run(train, step, 0)
    with pytest.raises(ValueError, match="rank 0 is the chief and no worker"):
        optimizer.run(train, step, group=ThreadGroup(1))
    with pytest.raises(TypeError, match="Workers are threads if no group is given"):
        optimizer.run(train, step, group=ThreadGroup(2))
    with pytest.raises(ValueError, match="Global step is required to check staleness"):
        optimizer.run(train, num_workers=1)
    with pytest.raises(ValueError, match="timeout_s must be a limited number"):
        optimizer.run(train, step, 1, timeout_s=-1)
    with in_replica(ReplicaContext(0, 2)), pytest.raises(RuntimeError, match="in a replica"):
        optimizer.run(train, step, 1)
    assert (w.numpy().tolist(), int(step)) == ([0], 0)
