"""A chief and its workers in processes do what TensorFlow's do, and what those in threads do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi_job import Job, run_job
from mpi_programs import same_of_all, workers_and_chief
from mpi_sync_programs import NUM_STEPS, PROGRAMS, figures_of
from mpi_sync_programs import __file__ as program_file
from sync_golden import CASES, Replay, replay_in_threads

import gpuopt
from gpuopt.distributed import ThreadGroup

pytestmark = pytest.mark.mpi

SIZES = [3, 4]  # ranks: a chief, and two or three workers


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of a job have written the outcomes of all programs."""
    return run_programs(request.param, tmp_path_factory.mktemp(f"ranks_{request.param}"))[0]


def run_programs(num_ranks: int, folder: Path) -> tuple[Path, Job]:
    job = run_job(num_ranks, program_file, folder, *PROGRAMS)
    assert job.status == 0, job
    return folder, job


def test_messages_come_whole_and_in_their_order_from_whom_one_listens_to(folder: Path) -> None:
    chief, (first, *others) = workers_and_chief(folder, "send_messages")
    (is_right, ends, wrong), failed, called = chief
    last = len(others) + 1
    assert is_right
    assert ends == [
        f"CancelledError: rank {rank} has finished, and will not come" for rank in (1, last, 1)
    ]
    assert wrong == [
        f"ValueError: rank must be another one of {last + 1} ranks, got {rank}"
        for rank in (0, -1, last + 1)
    ]
    told = [1, "rank 1 has failed: KeyError: 'lost'"]
    assert failed == told
    assert first[:2] == [[0, "done"], "raised"]
    assert [other[:2] for other in others] == [[[0, "done"], told]] * len(others)
    assert called == "ValueError: rank 1 makes another call than to send a message"
    assert all("has finished, and will not come" in worker[2] for worker in (first, *others))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["tag"])
def test_replays_tensorflows_events_as_threads_do(case: dict[str, Any], folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "replay_golden")
    if len(workers) != case["total_num_replicas"]:
        assert case["tag"] not in chief
        return
    of_chief = chief[case["tag"]]
    of_workers = [worker[case["tag"]] for worker in workers]
    replay = Replay(case)

    def look(position: int, snapshot: Any, blocked: list[int], local_steps: list[int]) -> None:
        replay.check(position, of_chief["snapshots"][position][0])
        assert of_chief["snapshots"][position] == [snapshot, blocked], position
        assert [each["local_steps"][position] for each in of_workers] == local_steps, position
        assert local_steps == case["events"][position]["local_steps"], position

    coordinator = replay_in_threads(replay, look)
    for outcome in (of_chief, *of_workers):
        assert outcome["figures"] == figures_of(coordinator)
        assert outcome["was_stopped"]


def test_every_setting_equals_its_replay_on_all_ranks(folder: Path) -> None:
    # The chief has compared its weights with a sequential replay.
    settings = same_of_all(folder, "train_freely")
    assert len(settings) >= 5
    for aggregate, policy, steps, figures, _ in settings:
        total = len(figures)
        # With fewer gradients than workers, several may be on their way to the last step.
        assert NUM_STEPS <= steps < NUM_STEPS + total, (aggregate, policy)
        assert sum(accepted for accepted, _ in figures) >= aggregate * steps
        if policy == "per_step" and aggregate == total:
            assert figures == [[NUM_STEPS, 0]] * total


def test_workers_have_the_chiefs_values_and_the_chief_the_state(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "begin_with_the_chiefs_values")
    assert chief["seen"] == []
    assert chief["has_average"]
    names = {"w/Adam", "half/Adam", "brain/Adam", "beta1_power"}
    assert names <= set(chief["slots"])
    alone = gpuopt.Variable(np.ones(3, np.float32), name="alone")
    gpuopt.AdamOptimizer(0.1).apply_gradients([(alone.numpy(), alone)])
    assert chief["bits"][0] == alone.numpy().tobytes().hex()
    for rank, worker in enumerate(workers, 1):
        assert worker["seen"] == [5, 5, [1, 1, 1], [7, 7], 6]
        assert worker["kept"] == [rank, rank]  # not trainable, and so its own
        assert not worker["has_average"]
        assert (worker["step"], worker["bits"], worker["slots"]) == (6, chief["bits"], [])


def test_ranks_that_bring_other_things_are_told_by_name(folder: Path) -> None:
    shape, name, step, policy, aggregate, size = same_of_all(folder, "bring_other_things")
    assert 'trainable variable "w": float32[2] on rank 0, 1' in shape
    assert "float32[3] on rank 2" in shape
    assert 'trainable variable "u": float32[2] on rank 0, 1' in name
    assert 'trainable variable "v": none on rank 0, 1' in name
    assert "the type of global_step: int64 on rank 0, 1" in step
    assert "int32 on rank 2" in step
    assert "token_policy: 'per_step' on rank 0, 1" in policy
    assert "'tf' on rank 2" in policy
    assert "replicas_to_aggregate: 1 on rank 0, 1" in aggregate
    assert "2 on rank 2" in aggregate
    assert "5 workers and a chief, so it needs 6 ranks" in size


def test_wrong_pushes_are_refused_and_the_worker_goes_on(folder: Path) -> None:
    _, workers = workers_and_chief(folder, "push_other_things")
    for index, (errors, *rest) in enumerate(workers):
        expected = [
            'ValueError: the gradient for "w" is IndexedSlices; the first one was an array',
            'ValueError: "late" was not there',
            "ValueError: Must supply at least one variable",
            'ValueError: gradient for "w" has shape (3,)',
            "ValueError: Global step is required to check staleness",
            'TypeError: global_step "late" must be a scalar number',
            "RuntimeError: MovingAverageOptimizer adds to steps",
            f"RuntimeError: worker {index} must apply its gradients on the thread",
        ]
        assert len(errors) == len(expected)
        assert all(map(str.startswith, errors, expected)), errors
        assert rest == [[[2, 0]] * len(workers), 2, [-2, -2]]


def test_a_forked_child_is_no_worker(folder: Path) -> None:
    _, workers = workers_and_chief(folder, "push_from_a_forked_child")
    for told, values in workers:
        assert told.startswith("WorkerFailedError: the workers belong to process")
        assert values == [-3, -3]


def test_a_skipped_step_is_gathered_for_again(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "skip_steps")
    number = len(workers)  # of pushes with a NaN in three rounds
    steps = 3 - number
    for local_steps, *rest in workers:
        assert local_steps == [0, 0, 1][:3] if number == 2 else [0, 0, 0]
        assert rest == chief[1:] == [[[3, 0]] * number, steps, [-steps, -steps]]


# Failures and deadlines.


def test_a_worker_that_fails_ends_the_others_only_if_they_need_it(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "fail_in_a_worker")
    if len(workers) == 2:
        first, failed = workers
        text = "worker 1, rank 2, has failed: KeyError('lost')"
        assert chief == [f"WorkerFailedError: {text}", 1, [-1, -1]]
        assert failed[0] == "KeyError: 'lost'"
        assert first[0].startswith("WorkerFailedError: worker 1 has failed: KeyError('lost'); step")
    else:
        assert [*workers, chief] == [["nothing", 4, [-4, -4]]] * 4


def test_an_update_that_fails_is_raised_by_the_chief_and_told_to_the_workers(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "fail_in_the_update")
    assert chief == "ZeroDivisionError: no rate"
    told = "WorkerFailedError: rank 0 has failed: ZeroDivisionError: no rate"
    assert workers == [told] * len(workers)


def test_a_worker_that_never_pushes_is_named_in_time(folder: Path) -> None:
    _, workers = workers_and_chief(folder, "never_push")
    for index, (errors, *rest) in enumerate(workers):
        assert rest == [[worker != 1 for worker in range(len(workers))], 0]
        if index == 1:
            assert errors == []
            continue
        [error] = errors
        assert f"DeadlineExceededError: worker {index} waited 0.4 s for its token" in error
        assert "worker 1 has not pushed again" in error


def test_the_token_of_a_worker_that_left_is_the_others(folder: Path) -> None:
    assert same_of_all(folder, "leave_while_waiting") == 2


def test_a_straggler_is_left_behind_and_its_late_gradient_dropped(folder: Path) -> None:
    figures, values = same_of_all(folder, "be_a_straggler")
    *others, straggler = figures
    assert straggler == [0, 1]
    assert others == [[3, 0]] * len(others)
    assert values == [-3, -3]


def test_a_worker_that_does_not_end_is_left_behind_and_comes_back(folder: Path) -> None:
    _, workers = workers_and_chief(folder, "leave_a_worker_behind")
    for index, (errors, *rest) in enumerate(workers):
        if index == len(workers) - 1 and len(workers) == 3:
            assert errors == ["CancelledError: the training is over"]
            assert rest[:2] == [[[3, 0], [3, 0], [0, 0]], [0, 0]]
        assert rest[-2:] == [5, [-5, -5]]


def test_a_signal_to_one_worker_stops_all(folder: Path) -> None:
    assert same_of_all(folder, "stop_by_a_worker") == [True, True, True]


def test_a_group_of_threads_is_refused() -> None:
    w = gpuopt.Variable(np.zeros(2, np.float32))
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)

    def train(worker: Any) -> None:
        worker.apply_gradients([(np.ones(2, np.float32), w)], step)

    with pytest.raises(TypeError, match="needs a group of processes that send each other messages"):
        sync.run(train, step, group=ThreadGroup(2))
