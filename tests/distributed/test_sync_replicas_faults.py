"""No step that is skipped, worker that fails or deadline that passes leaves anybody stuck.

What they expect is the table in docs/guides/workers_and_towers.md.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
import pytest
from interrupt_at import Interrupt, InterruptAt
from sync_training import LONG_S, SHORT_S, Call, Training, new_step

import gpuopt
from gpuopt import (
    CancelledError,
    DeadlineExceededError,
    SyncReplicasOptimizer,
    Variable,
    WorkerFailedError,
)
from gpuopt.distributed import SyncReplicasWorker

NAN = float("nan")

policies = pytest.mark.parametrize("policy", ["tf", "per_step"])
# Random interleavings of test_sync_replicas.py mix policies, numbers of workers and skipped steps.
settings = pytest.mark.parametrize(("policy", "backups"), [("tf", 1), ("per_step", 0)])
all_settings = pytest.mark.parametrize(
    ("policy", "backups"), [("tf", 0), ("tf", 1), ("per_step", 0), ("per_step", 1)]
)
settings_and_skips = pytest.mark.parametrize(
    ("policy", "backups", "skips"),
    [("tf", 0, True), ("tf", 1, True), ("per_step", 0, True), ("per_step", 1, False)],
)


def start(
    policy: Any, backups: int, optimizer: Any = None, aggregate: int = 2, **options: Any
) -> Training:
    """Makes workers, of whom `aggregate` make a step; the initial tokens waste no gradient."""
    skipping = gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="skip")
    return Training(
        aggregate,
        aggregate + backups,
        optimizer=optimizer or skipping,
        token_policy=policy,
        num_tokens=0 if policy == "tf" else -1,
        **options,
    )


def skip_a_step(training: Training) -> None:
    aggregate = training.coordinator.replicas_to_aggregate
    others = [training.in_thread(worker) for worker in range(aggregate - 1)]
    training.push(aggregate - 1, NAN)
    assert all(call.join().error is None for call in others)


def num_accumulated(training: Training) -> int:
    return training.coordinator.num_accumulated(training.w)


class Waiting(gpuopt.GradientDescentOptimizer):
    """An optimizer whose steps, skipped ones too, take until they are told to end."""

    def __init__(self) -> None:
        super().__init__(1.0, on_nonfinite="skip")
        self.begun, self.may_end = threading.Event(), threading.Event()

    def apply_gradients(self, *arguments: Any, **options: Any) -> None:
        self.begun.set()
        assert self.may_end.wait(LONG_S)
        super().apply_gradients(*arguments, **options)


# Skipped


@settings
def test_a_skipped_step_is_gathered_for_again(policy: Any, backups: int) -> None:
    training = start(policy, backups)
    for _ in range(2):
        skip_a_step(training)
        assert int(training.step) == 0
        assert num_accumulated(training) == 0
        assert [worker.local_step for worker in training.workers[:2]] == [0, 0]
    assert training.coordinator.num_tokens() == (2 * backups if policy == "tf" else 0)
    first = training.in_thread(0, 1.0)
    training.push(1, 3.0)
    assert first.join().error is None
    assert int(training.step) == 1
    assert training.w.numpy().tolist() == [-2, -2]
    figures = training.coordinator.figures()
    assert [(each.accepted, each.stale) for each in figures[:2]] == [(3, 0), (3, 0)]


class CountsSkips(gpuopt.GradientDescentOptimizer):
    """An optimizer that leaves out steps with NaN, and counts them."""

    skips = 0

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, **_: Any) -> None:
        before = int(global_step)
        super().apply_gradients(grads_and_vars, global_step)
        self.skips += int(global_step) == before


@pytest.mark.parametrize(
    ("policy", "backups", "num_tokens"), [("tf", 0, -1), ("tf", 1, 0), ("per_step", 1, -1)]
)
def test_a_run_goes_on_after_skipped_steps(policy: Any, backups: int, num_tokens: int) -> None:
    step, w = new_step(), Variable(np.zeros(2, np.float32), name="w")
    optimizer = CountsSkips(1.0, on_nonfinite="skip")
    sync = SyncReplicasOptimizer(optimizer, 2, 2 + backups)
    steps_to_skip = {5: 1, 6: 3, 11: 4}  # until so many have been skipped

    def train(worker: SyncReplicasWorker) -> None:
        while worker.local_step < 20:
            bad = optimizer.skips < steps_to_skip.get(worker.local_step, 0)
            worker.apply_gradients([(np.float32([NAN if bad else 1, 1]), w)], step)

    sync.run(train, step, num_tokens, token_policy=policy, timeout_s=LONG_S)
    assert optimizer.skips >= 4
    assert int(step) >= 20
    assert w.numpy().tolist() == [-int(step)] * 2


@policies
def test_a_backups_gradient_after_a_skipped_step_counts_for_the_next_try(policy: Any) -> None:
    training = start(policy, 1)
    skip_a_step(training)
    backup = training.in_thread(2, 5.0)
    assert num_accumulated(training) == 1
    training.push(0, 1.0)
    assert backup.join().error is None
    assert training.w.numpy().tolist() == [-3, -3]
    assert training.coordinator.figures()[2].stale == 0


@policies
def test_a_gradient_that_comes_while_a_step_is_skipped_is_dropped(policy: Any) -> None:
    optimizer = Waiting()
    training = start(policy, 1, optimizer)
    calls = [training.in_thread(0, NAN), Call(lambda: training.push(1))]
    assert optimizer.begun.wait(LONG_S)
    calls.append(training.in_thread(2, 7.0))
    assert not calls[2].is_done
    optimizer.may_end.set()
    assert all(call.join().error is None for call in calls)
    assert [each.stale for each in training.coordinator.figures()] == [0, 0, 1]
    assert (int(training.step), num_accumulated(training)) == (0, 0)
    assert [worker.local_step for worker in training.workers] == [0, 0, 0]


def test_more_gradients_than_workers_are_gathered_again_too() -> None:
    training = Training(
        3,
        1,
        optimizer=gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="skip"),
        num_tokens=2,
    )
    for gradient in (1, NAN, 1, 1, 2, 3):
        training.push(0, gradient)
    assert int(training.step) == 1
    assert training.w.numpy().tolist() == [-2, -2]
    assert training.coordinator.figures()[0].stale == 0


def test_averages_do_not_follow_a_skipped_step() -> None:
    w, step = Variable([4.0], name="w"), new_step()
    averages = gpuopt.ExponentialMovingAverage(0.5)
    sync = SyncReplicasOptimizer(
        gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="skip"), 1, 1, averages, [w]
    )
    with sync.start(step, 0), sync.worker(0) as worker:
        worker.apply_gradients([(np.float32([4]), w)], step)
        for _ in range(3):
            worker.apply_gradients([(np.float32([NAN]), w)], step)
    average = averages.average(w)
    assert average is not None
    assert (w.numpy().tolist(), average.numpy().tolist()) == ([0], [2])


# A global step that does not grow by 1


class Forgetful(gpuopt.GradientDescentOptimizer):
    """An optimizer that updates, and does not count."""

    def apply_gradients(self, grads_and_vars: Any, *_: Any, **__: Any) -> None:
        super().apply_gradients(grads_and_vars)


@settings
def test_a_global_step_that_stays_does_not_end_the_run(policy: Any, backups: int) -> None:
    training = start(policy, backups, Forgetful(1.0))
    for _ in range(4):
        first = training.in_thread(0)
        training.push(1)
        assert first.join().error is None
    assert int(training.step) == 0
    assert training.w.numpy().tolist() == [-4, -4]


@pytest.mark.parametrize(
    ("policy", "backups", "target"), [("tf", 0, 0), ("tf", 1, 1000), ("per_step", 1, 0)]
)
def test_a_global_step_that_is_set_does_not_end_the_run(
    policy: Any, backups: int, target: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = start(policy, backups)

    def step() -> None:
        first = training.in_thread(0)
        training.push(1)
        assert first.join().error is None

    for _ in range(3):
        step()
    training.step.assign(target)
    for _ in range(3):
        step()
    if policy == "tf" and backups:  # tokens that are left over are of earlier steps
        assert target < int(training.step) < target + 3
    else:
        assert int(training.step) == target + 3
        assert training.workers[1].local_step == target + 3
        assert training.w.numpy().tolist() == [-6, -6]
    assert caplog.text == ""


@policies
def test_gradients_from_before_the_step_was_set_forward_are_dropped(policy: Any) -> None:
    training = start(policy, 1)
    training.step.assign(1000)
    first = training.in_thread(0)
    training.push(1)
    assert first.join().error is None
    assert int(training.step) == 1001
    training.push(2)  # computed for step 0
    assert training.coordinator.figures()[2].stale == 1
    assert num_accumulated(training) == 0
    assert training.workers[2].local_step == 1001


@settings
def test_a_global_step_that_overflows_does_not_end_the_run(policy: Any, backups: int) -> None:
    step, w = Variable(np.int8(126), trainable=False), Variable([0.0], name="w")
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2, 2 + backups)

    def train(worker: SyncReplicasWorker) -> None:
        for _ in range(6):
            worker.apply_gradients([(np.float32([1]), w)], step)

    sync.run(train, step, 0, token_policy=policy, timeout_s=LONG_S)
    assert int(w.numpy()[0]) <= -5
    assert int(step) == 126 - int(w.numpy()[0]) - 256


def test_a_step_that_is_complete_when_an_update_ends_is_updated_too() -> None:
    optimizer = Waiting()
    optimizer.may_end.set()
    training = Training(1, 2, optimizer=optimizer, token_policy="per_step")
    training.step.assign(10)
    training.coordinator.close()
    training.coordinator = training.sync.start(training.step, token_policy="per_step")
    training.workers = [training.sync.worker(index) for index in range(2)]
    training.step.assign(3)  # as by a restored checkpoint; worker 1 still computes for step 10
    training.push(0)
    optimizer.may_end.clear()
    optimizer.begun.clear()
    updates = Call(lambda: training.push(0))
    assert optimizer.begun.wait(LONG_S)
    ahead = training.in_thread(1)
    optimizer.may_end.set()
    assert ahead.join().error is None
    assert updates.join().error is None
    assert int(training.step) == 6
    assert training.w.numpy().tolist() == [-3, -3]


@pytest.mark.parametrize("status", [None, 0, 3, "lost"])
def test_a_worker_that_exits_has_failed_if_there_is_a_status(status: Any) -> None:
    step, w = Variable(0, trainable=False), Variable([0.0], name="w")
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)

    def train(worker: SyncReplicasWorker) -> None:
        worker.apply_gradients([(np.float32([1]), w)], step)
        if worker.index == 0:
            sys.exit(status)
        worker.apply_gradients([(np.float32([1]), w)], step)

    def run() -> None:
        sync.run(train, step, 0, token_policy="per_step", timeout_s=LONG_S)

    if status:
        with pytest.raises(SystemExit, match=str(status)):
            run()
    else:
        run()
    assert int(step) == 1


# A worker that fails


@settings_and_skips
def test_a_worker_fails(policy: Any, backups: int, skips: bool) -> None:
    training = start(policy, backups)
    if skips:
        skip_a_step(training)
    waits = training.in_thread(0, 1.0)
    with pytest.raises(KeyError), training.workers[1]:
        raise KeyError("lost")
    if backups:
        training.push(2, 3.0)
        assert waits.join().error is None
        assert int(training.step) == 1
        assert training.w.numpy().tolist() == [-2, -2]
    else:
        error = waits.join().error
        assert isinstance(error, WorkerFailedError)
        assert "worker 1 has failed: KeyError('lost'); step 0 has 1 of 2" in str(error)
        assert num_accumulated(training) == 1  # who comes back completes the step
        training.workers[1] = training.sync.worker(1)
        training.push(1, 3.0)
        assert training.w.numpy().tolist() == [-2, -2]


@settings
def test_a_worker_fails_while_a_step_is_skipped(policy: Any, backups: int) -> None:
    optimizer = Waiting()
    training = start(policy, backups, optimizer)
    calls = [training.in_thread(0, NAN), Call(lambda: training.push(1))]
    assert optimizer.begun.wait(LONG_S)
    last = training.workers[-1]
    with pytest.raises(KeyError), last:
        raise KeyError("lost")
    optimizer.may_end.set()
    assert all(call.join().error is None for call in calls)
    waits = training.in_thread(0, 1.0)
    if backups:
        training.push(1, 3.0)
        assert waits.join().error is None
        assert int(training.step) == 1
    else:
        assert isinstance(waits.join().error, WorkerFailedError)


# An update that fails


def test_an_update_fails_by_an_error_without_a_text() -> None:
    class Unwritable(Exception):
        def __repr__(self) -> str:
            raise ValueError("no text")

    class Failing(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            raise Unwritable

    training = start("per_step", 0, Failing(1.0))
    waits = training.in_thread(0, 1.0)
    with pytest.raises(Unwritable):
        training.push(1, 1.0)
    error = waits.join().error
    assert isinstance(error, WorkerFailedError)
    assert "failed while it updated the variables: <repr() of Unwritable raised Val" in str(error)


@settings_and_skips
def test_an_update_fails(policy: Any, backups: int, skips: bool) -> None:
    class Failing(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            raise ZeroDivisionError("no rate")

    training = start(policy, backups, Failing(1.0, on_nonfinite="skip"))
    if skips:
        skip_a_step(training)
    waits = training.in_thread(0, 1.0)
    with pytest.raises(ZeroDivisionError):
        training.push(1, 1.0)
    if policy == "per_step" or not (backups and skips):
        error = waits.join().error
        assert isinstance(error, WorkerFailedError)
        assert isinstance(error.__cause__, ZeroDivisionError)
    else:  # it took the token that the skipped step left over
        assert waits.join().error is None
    for worker in range(2 + backups):
        with pytest.raises(WorkerFailedError, match="worker 1 failed while it updated"):
            training.push(worker)
    assert int(training.step) == 0
    assert num_accumulated(training) == 0


def test_run_raises_what_the_update_raised() -> None:
    step, w = Variable(0, trainable=False), Variable([0.0], name="w")

    def rate() -> float:
        raise ZeroDivisionError("no rate")

    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(rate), 2, 3)

    def train(worker: SyncReplicasWorker) -> None:
        worker.apply_gradients([(np.float32([1]), w)], step)

    with pytest.raises(ZeroDivisionError, match="no rate"):
        sync.run(train, step, 0, timeout_s=LONG_S)


def test_gradients_that_cannot_be_added_up_are_an_error_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def accept(self: Any, grad: Any, local_step: int) -> bool:
        raise MemoryError("no room")

    training = start("per_step", 1)
    waits = training.in_thread(0)
    monkeypatch.setattr(gpuopt.ConditionalAccumulator, "accept", accept)
    with pytest.raises(MemoryError):
        training.push(1)
    error = waits.join().error
    assert isinstance(error, WorkerFailedError)
    assert "worker 1 failed while it handed over its gradients: MemoryError" in str(error)


# A deadline that passes


@settings_and_skips
def test_a_deadline_passes(policy: Any, backups: int, skips: bool) -> None:
    training = start(policy, backups, aggregate=3, timeout_s=SHORT_S)
    if skips:
        skip_a_step(training)
    for _ in range(training.coordinator.num_tokens()):  # what the skipped step left to a backup
        training.push(0, 3.0)
    there = num_accumulated(training)
    assert there == (skips and backups and policy == "tf")
    with pytest.raises(DeadlineExceededError, match=f"step 0 has {there + 1} of 3 gradients"):
        training.push(0, 3.0)
    assert num_accumulated(training) == there + 1  # the gradient stays
    again = [training.in_thread(0, 3.0) for _ in range(1 - there)]  # counts twice
    training.push(2, 9.0)
    assert all(call.join().error is None for call in again)
    assert int(training.step) == 1
    assert training.w.numpy().tolist() == [-5, -5]


@settings
def test_a_deadline_passes_while_a_step_is_skipped(policy: Any, backups: int) -> None:
    optimizer = Waiting()
    training = start(policy, backups, optimizer, timeout_s=SHORT_S)
    waits = training.in_thread(0, NAN)
    updates = Call(lambda: training.push(1))
    assert optimizer.begun.wait(LONG_S)
    error = waits.join().error
    assert isinstance(error, DeadlineExceededError)
    assert "worker 1 is still updating the variables" in str(error)
    optimizer.may_end.set()
    assert updates.join().error is None
    # Who gave up may push again, for the step that is still to be done.
    again = training.in_thread(0, 1.0)
    training.push(1, 3.0)
    assert again.join().error is None
    assert int(training.step) == 1
    assert training.w.numpy().tolist() == [-2, -2]


@all_settings
def test_a_deadline_that_a_worker_does_not_survive(policy: Any, backups: int) -> None:
    training = start(policy, backups, timeout_s=SHORT_S)
    with pytest.raises(DeadlineExceededError), training.workers[0]:
        training.push(0, 1.0)
    training.push(1, 3.0)  # the gradient of who has left still counts
    assert int(training.step) == 1
    assert training.w.numpy().tolist() == [-2, -2]
    if policy == "tf":  # the tokens of who has left let one worker contribute twice
        training.push(1)
        training.push(1)
        assert int(training.step) == 2
    elif backups:
        training.push(2)  # a step late, and dropped
        backup = training.in_thread(2)
        training.push(1)
        assert backup.join().error is None
        assert int(training.step) == 2
    else:
        with pytest.raises(WorkerFailedError, match="worker 0 has failed: DeadlineExceeded"):
            training.push(1)


# Everybody leaves


@settings_and_skips
def test_the_last_worker_is_told_that_the_others_have_finished(
    policy: Any, backups: int, skips: bool
) -> None:
    training = start(policy, backups)
    if skips:
        skip_a_step(training)
    for worker in training.workers[1:]:
        with worker:
            pass
    if training.coordinator.num_tokens():  # what the skipped step left to a backup
        training.push(0)
        training.push(0)
        assert int(training.step) == 1
    else:
        with pytest.raises(CancelledError, match="have finished"):
            training.push(0)


def test_who_closes_is_told_of_an_update_that_does_not_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = Waiting()
    training = Training(1, 1, optimizer=optimizer, num_tokens=0, timeout_s=SHORT_S)
    updates = Call(lambda: training.push(0))
    assert optimizer.begun.wait(LONG_S)
    training.coordinator.close()
    assert "worker 0 is still updating the variables after 0.3 s" in caplog.text
    optimizer.may_end.set()
    updates.join()


# Of an interrupt in a callback of a weak reference, which Python does not raise.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_may_follow_one_that_ctrl_c_has_ended_at_any_moment() -> None:
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 2)
    v, step = Variable(np.zeros(3)), Variable(0, dtype=np.int64)

    def run() -> None:
        sync.run(
            lambda worker: worker.apply_gradients([(np.ones(3), v)], step),
            step,
            token_policy="per_step",
            timeout_s=10,
        )

    moment = 0
    while True:
        moment += 3
        # An interrupt inside Python's own Thread.start may strand the new thread for good.
        interrupt = InterruptAt(moment, left_out=threading)
        with suppress(Interrupt), interrupt:
            run()
        before, began = int(step), monotonic()
        run()
        assert int(step) > before
        assert monotonic() - began < 5
        if interrupt.left > 0:
            break
    assert moment > 60
    with sync.start(step), pytest.raises(RuntimeError, match="is started already"):
        run()
