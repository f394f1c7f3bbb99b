"""Sync replicas do what TensorFlow's do, equal a sequential replay bit by bit, and never hang."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sync_golden import CASES, Replay, is_at_rest, num_pushes, replay_in_threads
from sync_training import (
    LONG_S,
    SHORT_S,
    SLACK_S,
    Call,
    Problem,
    SlowDescent,
    Training,
    new_step,
    until,
)

import gpuopt
from gpuopt import (
    CancelledError,
    DeadlineExceededError,
    IndexedSlices,
    SyncReplicasOptimizer,
    TowerOptimizer,
    Variable,
    WorkerFailedError,
)
from gpuopt.distributed import Coordinator, StopRequest, SyncReplicasWorker

# What TensorFlow did.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["tag"])
def test_replays_tensorflows_events(case: dict[str, Any]) -> None:
    replay = Replay(case)

    def look(position: int, snapshot: Any, blocked: list[int], local_steps: list[int]) -> None:
        event = case["events"][position]
        replay.check(position, snapshot)
        assert blocked == sorted(event.get("blocked_after", [])), position
        assert local_steps == event["local_steps"], position

    replay_in_threads(replay, look)


# Final weights are those of a sequential replay of the accepted gradients, bit by bit.


def fuzzed_interleaving(seed: int) -> None:
    """Lets workers push in a random order until some steps are done; nothing may get stuck.

    Some gradients are NaN, and have their step skipped.
    """
    chance = random.Random(seed)
    total = chance.randint(1, 5)
    policy: Any = chance.choice(["tf", "per_step"])
    aggregate = chance.randint(1, total if policy == "per_step" else 6)
    tokens = -1 if policy == "per_step" else chance.randint(max(0, aggregate - total), 6)
    problem, step = Problem(), new_step()
    sync = SyncReplicasOptimizer(problem.optimizer, aggregate, total)
    coordinator = sync.start(step, tokens, token_policy=policy)
    local_steps, reads = [0] * total, [problem.read()] * total
    tickets: dict[int, Any] = {}
    log: list[list[int]] = []
    current: list[int] = []
    is_spoiled = False
    wanted, share_of_nan = chance.randint(1, 5), chance.choice([0, 0.05, 0.2])
    while int(step) < wanted:
        ready = [worker for worker in range(total) if worker not in tickets]
        assert ready, f"seed {seed} is stuck"
        worker, before = chance.choice(ready), coordinator.figures()
        pairs = problem.pairs(worker, local_steps[worker], reads[worker])
        pairs = [(g if isinstance(g, IndexedSlices) else g.astype(np.float32), v) for g, v in pairs]
        is_nan = chance.random() < share_of_nan
        if is_nan:
            pairs[0][0][0] = np.nan
        tickets[worker] = coordinator.push(worker, local_steps[worker], pairs)
        if coordinator.figures()[worker].accepted > before[worker].accepted:
            assert local_steps[worker] == len(log)
            current.append(worker)
            is_spoiled |= is_nan
        if len(current) == aggregate:
            if not is_spoiled:
                log.append(current)
            current, is_spoiled = [], False
        assert int(step) == len(log)
        for waiting in [worker for worker, ticket in tickets.items() if ticket.is_done]:
            local_steps[waiting] = coordinator.wait(tickets.pop(waiting))
            reads[waiting] = problem.read()
        if policy == "per_step" and aggregate == total:
            assert all(figures.stale == 0 for figures in coordinator.figures())
    assert all(len(workers) == aggregate for workers in log)
    problem.assert_is_replayed_by(log)


@pytest.mark.parametrize("block", range(4))
def test_random_interleavings_equal_their_replay(block: int) -> None:
    for seed in range(250 * block, 250 * block + (250 if os.environ.get("GPUOPT_FULL") else 30)):
        fuzzed_interleaving(seed)


@pytest.mark.parametrize(
    ("aggregate", "total", "policy"),
    [(2, 3, "tf"), (4, 2, "tf"), (2, 2, "per_step"), (1, 3, "per_step")],
)
def test_threads_equal_their_replay(
    aggregate: int, total: int, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, step = Problem(), new_step()
    log: list[list[int]] = []
    this_thread = threading.local()
    accept = gpuopt.ConditionalAccumulator.accept

    def logged(self: Any, grad: Any, local_step: int) -> bool:
        accepted = accept(self, grad, local_step)
        if accepted:
            log.extend([] for _ in range(local_step + 1 - len(log)))
            log[local_step].append(this_thread.index)
        return accepted

    monkeypatch.setattr(gpuopt.ConditionalAccumulator, "accept", logged)

    def train(worker: SyncReplicasWorker) -> None:
        this_thread.index = worker.index
        chance = random.Random(worker.index)
        while int(step) < 60:
            pairs = problem.pairs(worker.index, worker.local_step, problem.read())
            if chance.random() < 0.2:
                time.sleep(0.001 * chance.random())
            worker.apply_gradients(pairs, step)

    sync = SyncReplicasOptimizer(problem.optimizer, aggregate, total)
    coordinator = sync.run(train, step, token_policy=policy, timeout_s=LONG_S)
    assert int(step) >= 60
    problem.assert_is_replayed_by(log[: int(step)])
    accepted = sum(figures.accepted for figures in coordinator.figures())
    assert accepted == sum(map(len, log)) >= aggregate * int(step)


def test_the_default_tokens_waste_the_second_round() -> None:
    training = Training(2, 2)
    for _ in range(2):
        calls = [training.in_thread(0), training.in_thread(1)]
        assert all(call.join().error is None for call in calls)
    assert int(training.step) == 1
    assert [figures.stale for figures in training.coordinator.figures()] == [1, 1]


@pytest.mark.parametrize(("policy", "wastes"), [("tf", True), ("per_step", False)])
def test_per_step_tokens_waste_no_gradient_of_a_healthy_worker(policy: Any, wastes: bool) -> None:
    tokens = 0 if policy == "tf" else -1
    training = Training(2, 3, num_tokens=tokens, token_policy=policy)
    calls: dict[int, Call] = {}
    for _ in range(60):
        for worker in (0, 1):  # worker 2 never comes
            if worker not in calls or calls[worker].is_done:
                calls[worker] = training.in_thread(worker)
        until(lambda: is_at_rest(training.coordinator, {w: [call] for w, call in calls.items()}))
    stale = sum(figures.stale for figures in training.coordinator.figures())
    assert (stale > 0) == wastes
    assert int(training.step) == 60 if not wastes else int(training.step) < 60
    training.coordinator.close()


# Nobody hangs.


def test_a_straggler_is_left_behind_and_its_late_gradient_dropped() -> None:
    training = Training(2, 3, token_policy="per_step")
    for gradient in (1.0, 2.0):
        calls = [training.in_thread(0, gradient), training.in_thread(1, gradient)]
        assert all(call.join().error is None for call in calls)
    assert training.w.numpy().tolist() == [-3, -3]
    assert training.workers[2].local_step == 0
    training.push(2, 100.0)
    assert training.w.numpy().tolist() == [-3, -3]
    assert training.workers[2].local_step == 2
    assert [f.stale for f in training.coordinator.figures()] == [0, 0, 1]


def test_an_exception_in_one_worker_is_named_to_the_others() -> None:
    training = Training(2, 2, num_tokens=0)
    waits = training.in_thread(0)
    cause = ZeroDivisionError("no data")
    with pytest.raises(ZeroDivisionError), training.workers[1]:
        raise cause
    error = waits.join().error
    assert isinstance(error, WorkerFailedError)
    assert error.__cause__ is cause
    assert "worker 1 has failed: ZeroDivisionError('no data')" in str(error)
    assert "step 0 has 1 of 2 gradients" in str(error)
    assert waits.seconds < SLACK_S


def test_who_comes_after_the_exception_is_told_too() -> None:
    training = Training(2, 2, num_tokens=0)
    with pytest.raises(KeyError), training.workers[1]:
        raise KeyError("lost")
    with pytest.raises(WorkerFailedError, match="worker 1 has failed: KeyError"):
        training.push(0)


def test_a_worker_that_never_pushes_is_named_in_time() -> None:
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, 2)
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")
    coordinator = sync.start(step, 0, timeout_s=SHORT_S)
    worker = sync.worker(0)
    started = time.monotonic()
    with pytest.raises(
        DeadlineExceededError,
        match=r"worker 0 waited 0\.3 s for its token: step 0 has 1 of 2 gradients; "
        "worker 1 has never come",
    ):
        worker.apply_gradients([(np.ones(2, np.float32), w)], step)
    assert SHORT_S <= time.monotonic() - started < SHORT_S + SLACK_S
    assert coordinator.num_waiting() == 0
    assert coordinator.figures()[0].waited_s >= SHORT_S


def test_a_thread_that_died_silently_is_named_in_time() -> None:
    w, step = Variable(np.zeros(2, np.float32)), new_step()
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, 2)
    sync.start(step, num_tokens=0, timeout_s=SHORT_S)
    died = Call(lambda: sync.worker(1))
    assert died.join().error is None
    with pytest.raises(DeadlineExceededError, match="worker 1's thread has ended"):
        sync.worker(0).apply_gradients([(np.ones(2, np.float32), w)], step)


def test_a_slow_update_does_not_hold_up_anothers_deadline() -> None:
    optimizer = SlowDescent()
    training = Training(1, 2, num_tokens=0, optimizer=optimizer, timeout_s=SHORT_S)
    updates = Call(lambda: training.push(0))
    assert optimizer.begun.wait(LONG_S)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match="worker 0 is still updating the variables"):
        training.push(1)
    assert SHORT_S <= time.monotonic() - started < SHORT_S + SLACK_S
    optimizer.may_end.set()
    assert updates.join().error is None
    assert int(training.step) == 1


def test_closing_releases_everyone_who_waits_for_a_token() -> None:
    training = Training(3, 3, num_tokens=0)
    waits = [training.in_thread(0), training.in_thread(1)]
    training.coordinator.close()
    for call in waits:
        assert isinstance(call.join().error, CancelledError)
    with pytest.raises(CancelledError, match="closed"):
        training.push(2)
    assert training.w.numpy().tolist() == [0, 0]


def test_closing_waits_for_the_update_that_goes_on_and_releases_the_rest_at_once() -> None:
    optimizer = SlowDescent()
    training = Training(1, 2, num_tokens=0, optimizer=optimizer)
    updates = Call(lambda: training.push(0))
    assert optimizer.begun.wait(LONG_S)
    waits = training.in_thread(1)
    closes = Call(training.coordinator.close)
    assert isinstance(waits.join().error, CancelledError)
    assert not closes.is_done
    optimizer.may_end.set()
    assert closes.join().error is None
    assert training.w.numpy().tolist() == [-1, -1]
    assert updates.join().error is None


def test_who_waits_when_the_others_have_finished_is_told() -> None:
    training = Training(2, 2, num_tokens=0)
    waits = training.in_thread(0)
    with training.workers[1]:
        pass
    error = waits.join().error
    assert isinstance(error, CancelledError)
    assert "workers 1 have finished" in str(error)


# Running the workers.


def train_until(step: Variable, steps: int, w: Variable) -> Callable[[SyncReplicasWorker], None]:
    def train(worker: SyncReplicasWorker) -> None:
        while int(step) < steps:
            worker.apply_gradients([(np.ones(2, np.float32), w)], step)

    return train


def run(
    train: Callable[[SyncReplicasWorker], None], step: Variable, aggregate: int, total: int
) -> Coordinator:
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), aggregate, total)
    return sync.run(train, step, timeout_s=SHORT_S, token_policy="per_step")


def test_run_raises_what_a_worker_raised() -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == 1:
            raise KeyError("lost")
        train_until(step, 5, w)(worker)

    with pytest.raises(KeyError, match="lost"):
        run(train, step, 2, 2)


def test_run_goes_on_without_a_worker_that_it_can_spare(caplog: pytest.LogCaptureFixture) -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == 1:
            raise KeyError("lost")
        train_until(step, 5, w)(worker)

    run(train, step, 2, 3)
    assert int(step) == 5
    assert "worker 1 failed: KeyError('lost')" in caplog.text


def test_a_run_keeps_no_variable_alive() -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="mortal")
    alive = weakref.ref(w)
    gc.disable()  # which would find cycles, at some time
    try:
        run(train_until(step, 5, w), step, 1, 2)
        del w
        assert alive() is None
    finally:
        gc.enable()


def test_a_stop_request_ends_a_run() -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")
    stop = StopRequest()

    def train(worker: SyncReplicasWorker) -> None:
        while True:
            if worker.local_step == 3:
                stop.has_come = True
            worker.apply_gradients([(np.ones(2, np.float32), w)], step)

    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    coordinator = sync.run(train, step, token_policy="per_step", timeout_s=LONG_S, stop=stop)
    assert coordinator.was_stopped
    assert int(step) >= 3
    assert not run(train_until(step, 5, w), step, 2, 2).was_stopped


def test_run_leaves_a_worker_behind_that_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    # Its thread may outlive this test.
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="left_behind")
    release = threading.Event()

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == 2:
            release.wait(LONG_S)
        else:
            train_until(step, 5, w)(worker)

    ran = Call(lambda: run(train, step, 2, 3)).join()
    release.set()
    assert ran.error is None
    assert ran.seconds < SHORT_S + SLACK_S
    assert "workers [2] have not ended within 0.3 s" in caplog.text


# Arguments and state.


def test_minimize_and_the_optimizers_state_go_through_the_worker() -> None:
    step, w = new_step(), Variable(np.ones(2, np.float32), name="w")
    sync = SyncReplicasOptimizer(gpuopt.AdamOptimizer(0.1), 2)
    assert sync.total_num_replicas == 2

    def loss() -> Any:
        return (w * w).sum()

    sync.run(lambda worker: worker.minimize(loss, step, [w]), step, 0, timeout_s=LONG_S)
    alone = Variable(np.ones(2, np.float32), name="alone")
    adam = gpuopt.AdamOptimizer(0.1)
    adam.apply_gradients([(np.full(2, 2, np.float32), alone)])
    assert w.numpy().tolist() == alone.numpy().tolist()
    assert sync.get_slot_names() == ["m", "v"]
    assert sync.get_slot(w, "m").numpy().tolist() == adam.get_slot(alone, "m").numpy().tolist()
    names = [variable.name for variable in sync.variables()]
    assert names == ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]
    assert sync.get_name() == "sync_replicas"


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(w: Variable, sync: SyncReplicasOptimizer, step: Variable, steps: int) -> None:
        with sync.start(step, token_policy="per_step"), sync.worker(0) as worker:
            for _ in range(steps):
                worker.apply_gradients([(w.numpy() * 2, w)], step)

    w, step = Variable([1.0, -3.0], name="w"), new_step()
    sync = SyncReplicasOptimizer(gpuopt.AdamOptimizer(0.1), 1)
    train(w, sync, step, 3)
    state = sync.state_dict()
    assert list(state["slots"]) == ["m", "v"]
    path = gpuopt.Saver().save(str(tmp_path / "sync"), global_step=step)
    train(w, sync, step, 2)
    expected = w.numpy()
    gpuopt.Saver().restore(path)
    assert int(step) == 3
    train(w, sync, step, 2)
    assert w.numpy().tolist() == expected.tolist()

    again = SyncReplicasOptimizer(gpuopt.AdamOptimizer(0.1), 1)
    again.load_state_dict(state)
    assert again.get_slot(w, "m").numpy().tolist() == state["slots"]["m"]["w"].tolist()


def test_the_optimizer_itself_speaks_for_this_threads_worker() -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    pairs = [(np.ones(2, np.float32), w)]
    with sync.start(step), sync.worker(0):
        sync.apply_gradients(pairs, step)
    assert w.numpy().tolist() == [-1, -1]
    with pytest.raises(ValueError, match=r"inside `with sync\.worker\(index\):`"):
        sync.apply_gradients(pairs, step)


def test_variables_without_gradient_pass_through() -> None:
    training = Training(1, 1, num_tokens=0)
    idle = Variable(np.ones(2, np.float32), name="idle")
    training.workers[0].apply_gradients(
        [(np.ones(2, np.float32), training.w), (None, idle)], training.step
    )
    assert idle.numpy().tolist() == [1, 1]
    assert [variable.name for variable in training.coordinator.variables] == ["w"]


def test_training_goes_on_from_the_global_step() -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")
    step.assign(7)
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    with sync.start(step), sync.worker(0) as worker:
        assert worker.local_step == 7
        worker.apply_gradients([(np.ones(2, np.float32), w)], step)
    assert int(step) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: [(None, t.w), (np.ones(2, np.float32), new_step())], "Invalid type"),
        (lambda t: [(np.ones(3, np.float32), t.w)], r'"w" has shape \(3,\)'),
        (lambda t: [(IndexedSlices(np.ones(1, np.float32), [0]), t.w)], '"w" is IndexedSlices'),
        (
            lambda t: [(np.ones(2, np.float32), Variable(np.ones(2, np.float32), name="other"))],
            r"the first had them for \['w'\], this one has them for \['other'\]",
        ),
        (lambda t: [], "Must supply at least one variable"),
        (lambda t: [(None, t.w)], "No gradients provided for any variable"),
    ],
)
def test_a_wrong_push_is_refused_and_contributes_nothing(
    change: Callable[[Training], Any], message: str
) -> None:
    training = Training(2, 2)
    training.push(0)
    with pytest.raises(ValueError, match=message):
        training.workers[1].apply_gradients(change(training), training.step)
    assert training.coordinator.num_accumulated(training.w) == 1
    assert num_pushes(training.coordinator) == 1


def test_the_global_step_must_be_the_coordinators() -> None:
    training = Training(1, 1)
    pairs = [(np.ones(2, np.float32), training.w)]
    with pytest.raises(ValueError, match="Global step is required to check staleness"):
        training.workers[0].apply_gradients(pairs)
    with pytest.raises(ValueError, match='global_step must be "global_step"'):
        training.workers[0].apply_gradients(pairs, new_step())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_tokens": -2}, ValueError, "num_tokens must be at least -1"),
        ({"token_policy": "latest"}, ValueError, "token_policy"),
        ({"token_policy": "per_step"}, ValueError, "needs a worker for each gradient"),
        ({"num_tokens": 1}, ValueError, r"1 \(given\) vs 2 \(needed\)"),
        ({"timeout_s": float("inf")}, ValueError, "timeout_s"),
    ],
)
def test_wrong_settings_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 4, 2)
    with pytest.raises(error, match=message):
        sync.start(**{"global_step": new_step(), **arguments})


def test_a_global_step_must_be_an_integer_to_tell_late_gradients() -> None:
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    with pytest.raises(TypeError, match='global_step "step" must be an integer'):
        sync.start(Variable(0.0, name="step"))


def test_wrong_workers_and_second_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="replicas_to_aggregate must be at least 1"):
        SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 0)
    with pytest.raises(TypeError, match="the optimizer to wrap must be an Optimizer, got"):
        SyncReplicasOptimizer("Adam", 1)  # type: ignore[arg-type]
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1, 2)
    with pytest.raises(ValueError, match=r"start\(\) must be called"):
        sync.worker(0)
    coordinator = sync.start(new_step())
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        sync.worker(2)
    sync.worker(1)
    with pytest.raises(ValueError, match="worker 1 is there already"):
        sync.worker(1)
    with pytest.raises(RuntimeError, match="is started already"):
        sync.start(new_step())
    coordinator.close()
    sync.start(new_step()).close()


@pytest.mark.parametrize("wrap", [lambda adam: SyncReplicasOptimizer(adam, 1), TowerOptimizer])
def test_an_optimizer_in_a_wrapper_is_saved_as_without_the_wrapper(
    wrap: Callable[[gpuopt.Optimizer], gpuopt.Optimizer], tmp_path: Path
) -> None:
    w = Variable([1.0, -3.0], name="w")
    adam = gpuopt.AdamOptimizer(0.1)
    adam.apply_gradients([(w.numpy(), w)])
    wrapper = wrap(adam)
    savers = [
        gpuopt.Saver([w], optimizers=[adam]),
        gpuopt.Saver([w], optimizers=[wrapper]),
        gpuopt.Saver([w], optimizers=[adam, wrapper]),
        gpuopt.Saver(),
    ]
    paths = [saver.save(str(tmp_path / str(i))) for i, saver in enumerate(savers)]
    moments = adam.get_slot(w, "m").numpy().tolist()
    for saver, path in itertools.product(savers, paths):
        adam.apply_gradients([(w.numpy(), w)])
        assert adam.get_slot(w, "m").numpy().tolist() != moments
        saver.restore(path)
        assert adam.get_slot(w, "m").numpy().tolist() == moments


def test_what_a_worker_saves_can_be_restored_when_the_workers_are_gone(tmp_path: Path) -> None:
    w, step = Variable([1.0, -3.0], name="w"), new_step()
    sync = SyncReplicasOptimizer(gpuopt.AdamOptimizer(0.1), 2)
    saved: list[str] = []

    def train(worker: SyncReplicasWorker) -> None:
        while worker.local_step < 3:
            worker.apply_gradients([(w.numpy() * 2, w)], step)
            if worker.index == 0 and not saved:
                saved.append(gpuopt.Saver().save(str(tmp_path / "model"), global_step=step))

    sync.run(train, step, token_policy="per_step")
    assert int(step) == 3
    gpuopt.Saver().restore(saved[0])
    assert int(step) < 3


@pytest.mark.parametrize(("policy", "is_sparse"), [("propagate", True), ("skip", False)])
def test_the_mean_of_the_workers_gradients_is_clipped(policy: Any, is_sparse: bool) -> None:
    w, step = Variable(np.zeros((2, 1), np.float32), name="w"), new_step()
    optimizer = gpuopt.GradientDescentOptimizer(1.0, clip_norm=1.0, on_nonfinite=policy)
    given = [np.float32([[6], [0]]), np.float32([[0], [8]])]
    bad = [given[0], np.float32([[np.nan], [8]])]

    def train(worker: SyncReplicasWorker) -> None:
        for gradients in [given, bad] if policy == "skip" else [given]:
            gradient: Any = gradients[worker.index]
            if is_sparse:
                gradient = gpuopt.IndexedSlices(gradient, np.array([0, 1]), (2, 1))
            worker.apply_gradients([(gradient, w)], step)

    sync = SyncReplicasOptimizer(optimizer, 2)
    sync.run(train, step, token_policy="per_step", timeout_s=LONG_S)
    np.testing.assert_allclose(w.numpy(), [[-0.6], [-0.8]], rtol=1e-6)
    if policy == "propagate":
        assert optimizer.global_norm == 5
