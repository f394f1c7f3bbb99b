"""Workers in processes that drop stale gradients do what a replay in numpy does, and threads."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi_job import run_job
from mpi_programs import same_of_all, workers_and_chief
from mpi_stale_programs import PROGRAMS, SEEDS
from mpi_stale_programs import __file__ as program_file
from stale_training import NUM_PUSHES, new_order, replay

pytestmark = pytest.mark.mpi

SIZES = [3, 4]  # ranks: a chief, and two or three workers


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of a job have written the outcomes of all programs."""
    folder = tmp_path_factory.mktemp(f"ranks_{request.param}")
    job = run_job(request.param, program_file, folder, *PROGRAMS)
    assert job.status == 0, job
    return folder


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_arrivals_equals_its_replay_on_all_ranks(seed: int, folder: Path) -> None:
    _, workers = workers_and_chief(folder, "train_in_given_orders")
    got = same_of_all(folder, "train_in_given_orders")[seed]
    expected = replay(len(workers), seed % 3, new_order(len(workers), seed))
    assert got == expected
    accepted, stale = zip(*got[1], strict=True)
    assert sum(accepted)
    assert sum(stale)


def test_the_order_in_which_gradients_come_decides_all(folder: Path) -> None:
    (order, got), workers = workers_and_chief(folder, "train_freely")
    assert [outcome for _, outcome in workers] == [got] * len(workers)
    assert len(order) == NUM_PUSHES * len(workers)
    assert got == replay(len(workers), 1, order)


def test_in_a_workers_function_the_optimizer_does_what_the_worker_does(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "minimize_by_either")
    total = len(workers)
    for seen, *rest in workers:
        assert seen == [True] * 2
        assert rest == chief[1:]
    assert chief[1:] == [[total, [[3, 1]] * total], 3 * total, [3 * total] * 2]


def test_ranks_that_bring_other_things_are_told_by_name(folder: Path) -> None:
    staleness, timeout, name, size, counters = same_of_all(folder, "bring_other_things")
    assert "staleness: 1 on rank 0, 1" in staleness
    assert "2 on rank 2" in staleness
    assert "timeout_s: 20 on rank 0, 1" in timeout
    assert 'trainable variable "u": float32[2] on rank 0, 1' in name
    assert '"DropStaleGradient" has 5 workers and a chief, so it needs 6 ranks' in size
    assert counters == "nothing"


def test_wrong_pushes_are_refused_and_the_worker_goes_on(folder: Path) -> None:
    _, workers = workers_and_chief(folder, "push_other_things")
    for index, (errors, child, *rest) in enumerate(workers):
        expected = [
            'ValueError: "late" was not there',
            "ValueError: No variables provided",
            "ValueError: No gradients provided for any variable: ['w']",
            'ValueError: gradient for "w" has shape (3,)',
            'TypeError: gradient for "w" has dtype int32',
            'IndexError: gradient for "table"',
            'ValueError: global_step must be "global_step", with which',
            "RuntimeError: MovingAverageOptimizer adds to steps of the optimizer inside, and the "
            "chief makes those: wrap the optimizer that is inside of DropStaleGradientOptimizer",
            f"RuntimeError: worker {index} must apply its gradients on the thread",
            'RuntimeError: "DropStaleGradient" is in a run whose chief is another process',
            'RuntimeError: "DropStaleGradient" is started already',
        ]
        assert len(errors) == len(expected)
        assert all(map(str.startswith, errors, expected)), errors
        assert child.startswith("WorkerFailedError: the workers belong to process")
        total = len(workers)
        assert rest == [[[1, 0]] * total, total, [-total, -total]]


def test_a_gradient_with_a_nan_makes_no_step(folder: Path) -> None:
    figures, step, values = same_of_all(folder, "skip_steps")
    assert figures == [[3, 0]] * len(figures)
    assert step == 3 * len(figures) - 1
    assert values == [-step, -step]


def test_a_late_workers_gradient_is_dropped_and_its_next_one_is_not(folder: Path) -> None:
    figures, values = same_of_all(folder, "be_late")
    *others, late = figures
    assert others == [[3, 0]] * len(others)
    assert late == [1, 1]
    assert values == [-3 * len(others) - 1] * 2


def test_the_others_go_on_without_a_worker_that_fails(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "fail_in_a_worker")
    steps = 2 * len(workers) - 1
    for first, last in workers:
        assert first == ["nothing", steps, [-steps, -steps]]
        assert last == "KeyError: 'all of them'"
    assert chief[0] == ["nothing", steps, [-steps, -steps]]
    assert chief[1].endswith("has failed: KeyError('all of them')")
    assert chief[1].startswith("WorkerFailedError: worker ")


def test_a_worker_that_fails_as_the_last_one_is_no_other_case(folder: Path) -> None:
    (seen, *rest), workers = workers_and_chief(folder, "fail_when_the_others_have_finished")
    total = len(workers)
    assert seen == [rank for rank in range(2, total + 1) for _ in range(2)] + [1]
    for outcome in ([seen, *rest], *workers):
        assert outcome[1:] == [total - 1, [1 - total] * 2]


def test_an_update_that_fails_is_raised_by_the_chief_and_told_to_the_workers(folder: Path) -> None:
    chief, workers = workers_and_chief(folder, "fail_in_the_update")
    assert chief == "ZeroDivisionError: no rate"
    told = "WorkerFailedError: rank 0 has failed: ZeroDivisionError: no rate"
    assert workers == [told] * len(workers)


def test_a_signal_to_one_worker_stops_all(folder: Path) -> None:
    assert same_of_all(folder, "stop_by_a_worker") == [True, True, True]


def test_the_chief_saves_and_restores_for_all(folder: Path) -> None:
    first, second, third = same_of_all(folder, "train_again")
    assert first == [3, 0, [-4.25, -4.25]]
    assert second[:2] == [6, 7]
    assert third == second
