"""Whatever happens to a rank, the job ends in time and says why; nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_faults import NUM_STEPS
from mpi_faults import __file__ as program
from mpi_job import Job, run_job

pytestmark = pytest.mark.mpi

# After a fault, a job ends within this time; before it, it starts in the other one.
ENDS_WITHIN_S = 10.0
STARTS_WITHIN_S = 20.0
SHORT_S = 2.0


def run_fault(
    name: str,
    folder: Path,
    limit_s: float = 60.0,
    while_it_runs: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Job:
    """Runs a job of three ranks, whose waits may last `limit_s`."""
    return run_job(
        3,
        program,
        name,
        folder,
        str(limit_s),
        timeout_s=STARTS_WITHIN_S + ENDS_WITHIN_S + (limit_s if limit_s == SHORT_S else 0),
        while_it_runs=while_it_runs,
    )


def check_ends_soon(folder: Path) -> None:
    """A job that has just ended must have lost its rank less than the promised time ago."""
    assert time.time() - (folder / "killed").stat().st_mtime < ENDS_WITHIN_S


def count_tracebacks(job: Job) -> int:
    return job.errors.count("Traceback (most recent call last)")


@pytest.mark.parametrize("fault", ["kill_a_rank", "kill_a_worker"])
def test_a_rank_that_is_killed_ends_the_job_and_was_introduced(fault: str, tmp_path: Path) -> None:
    job = run_fault(fault, tmp_path)
    check_ends_soon(tmp_path)
    assert job.status != 0, job
    host = re.escape(socket.gethostname())
    for rank in range(3):
        assert re.search(rf"gpuopt: rank {rank} is process \d+ on {host}", job.errors), job
    assert count_tracebacks(job) == 0, job


@pytest.mark.parametrize(
    "fault",
    ["raise_in_a_run", "raise_between_runs", "raise_while_others_compute", "raise_in_a_worker"],
)
def test_an_exception_in_one_rank_ends_all_and_is_shown_once(fault: str, tmp_path: Path) -> None:
    job = run_fault(fault, tmp_path)
    assert job.status != 0, job
    assert count_tracebacks(job) == 1, job
    assert re.search(r"^KeyError: 'lost'", job.errors, re.MULTILINE), job
    if fault == "raise_in_a_worker":
        for rank in (0, 1):
            told = rf"gpuopt: rank {rank}: WorkerFailedError: worker 1.* has failed: KeyError"
            assert re.search(told, job.errors), job
    elif fault != "raise_while_others_compute":
        for rank in (0, 2):
            told = f"gpuopt: rank {rank}: WorkerFailedError: rank 1 has failed: KeyError: 'lost'"
            assert (fault, told in job.errors) == (fault, True), job


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exit_in_a_run", "rank 1 has failed: SystemExit: 3"),
        ("exit_in_a_worker", r"worker 1, rank 2, has failed: SystemExit\(3\)"),
    ],
)
def test_an_exit_in_one_rank_ends_all_with_its_status(
    fault: str, told: str, tmp_path: Path
) -> None:
    job = run_fault(fault, tmp_path)
    assert job.status == 3, job
    assert count_tracebacks(job) == 0, job
    assert re.search(f"WorkerFailedError: {told}", job.errors), job


def test_a_rank_that_exits_without_an_error_has_finished(tmp_path: Path) -> None:
    job = run_fault("exit_without_an_error", tmp_path)
    assert job.status == 0, job
    for rank in (0, 2):
        told = (tmp_path / f"told.{rank}").read_text()
        assert told == "rank 1 has finished, and will not come"


def test_a_worker_that_exits_without_an_error_has_finished(tmp_path: Path) -> None:
    job = run_fault("finish_by_an_exit_in_a_worker", tmp_path)
    assert job.status == 0, job
    assert "failed" not in job.errors, job


def test_ctrl_c_of_the_chief_ends_its_workers(tmp_path: Path) -> None:
    job = run_fault("interrupt_the_chief", tmp_path)
    assert job.status != 0, job
    assert count_tracebacks(job) == 1, job
    assert re.search("^KeyboardInterrupt", job.errors, re.MULTILINE), job
    for rank in (1, 2):
        told = f"gpuopt: rank {rank}: WorkerFailedError: rank 0 has failed: KeyboardInterrupt"
        assert told in job.errors, job


def test_a_chief_that_does_not_answer_ends_the_job(tmp_path: Path) -> None:
    job = run_fault("freeze_the_chief", tmp_path, SHORT_S)
    assert job.status != 0, job
    told = "DeadlineExceededError: worker 1: the chief, rank 0, has not answered within 1 s"
    assert told in job.errors, job


def test_a_rank_that_is_done_waits_for_the_others_without_a_limit(tmp_path: Path) -> None:
    job = run_fault("end_before_the_others", tmp_path, SHORT_S)
    assert job.status == 0, job
    assert {file.name for file in tmp_path.iterdir()} == {"done.1", "done.2"}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("never_start_mpi", "in _start_mpi_in_all_ranks"),
        ("never_make_the_group", "DeadlineExceededError: MPIGroup: rank 1 did not come within 2 s"),
        ("never_come", "DeadlineExceededError: the meeting: rank 1 did not come within 2 s"),
    ],
)
def test_a_rank_that_never_comes_is_named_and_ends_the_job(
    fault: str, named: str, tmp_path: Path
) -> None:
    job = run_fault(fault, tmp_path, SHORT_S)
    assert job.status != 0, job
    assert named in job.errors, job


def test_a_straggler_is_waited_for_and_named(tmp_path: Path) -> None:
    job = run_fault("come_late", tmp_path, 3 * SHORT_S)
    assert job.status == 0, job
    assert "the meeting: waiting for rank 1 since 3 s" in job.errors, job


def test_another_version_of_gpuopt_is_refused_by_all(tmp_path: Path) -> None:
    job = run_fault("bring_another_version", tmp_path)
    assert job.status == 0, job
    texts = [(tmp_path / f"refused.{is_rank_1}").read_text() for is_rank_1 in (0, 1)]
    assert all("same gpuopt" in text and "0.0.1 on rank 1" in text for text in texts)


# Training that goes on from its newest checkpoint.


TRAININGS = ["train_with_checkpoints", "train_workers_with_checkpoints"]


@pytest.fixture(scope="module", params=TRAININGS)
def training(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """A training, and the bits of its result if nothing happens to it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run_fault(request.param, folder).status == 0
    return request.param, result_of(folder)


def result_of(folder: Path) -> str:
    [bits] = {(folder / f"result.{rank}").read_text() for rank in range(3)}
    return bits


def saved_steps(folder: Path) -> list[int]:
    names = [file.stem for file in folder.glob("model-*.safetensors")]
    return sorted(int(name.removeprefix("model-")) for name in names)


def test_a_job_that_lost_a_rank_goes_on_from_the_newest_checkpoint(
    training: tuple[str, str], tmp_path: Path
) -> None:
    name, uninterrupted = training
    (tmp_path / "kill_at").write_text("10")
    assert run_fault(name, tmp_path).status != 0
    check_ends_soon(tmp_path)
    assert saved_steps(tmp_path) == [4, 8]
    (tmp_path / "kill_at").unlink()
    job = run_fault(name, tmp_path)
    assert job.status == 0, job
    assert [(tmp_path / f"began_at.{rank}").read_text() for rank in range(3)] == ["8"] * 3
    assert saved_steps(tmp_path) == [4, 8, NUM_STEPS]
    assert result_of(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    ("name", "target"),
    [(TRAININGS[0], "one rank"), (TRAININGS[0], "launcher"), (TRAININGS[1], "one rank")],
)
def test_sigterm_has_all_ranks_save_and_end(name: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()

    def terminate(job: subprocess.Popen[bytes]) -> None:
        ends = time.monotonic() + STARTS_WITHIN_S
        process = tmp_path / "pid.2"
        while not (4 in saved_steps(tmp_path) and process.exists()):
            assert job.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
        pid = int(process.read_text()) if target == "one rank" else job.pid
        os.kill(pid, signal.SIGTERM)

    job = run_fault(name, tmp_path, while_it_runs=terminate)
    if target == "one rank":  # Open MPI's launcher fails if it was told to end
        assert job.status == 0, job
    assert len(saved_steps(tmp_path)) == 2, job  # that of the stop, too
    assert not list(tmp_path.glob("result.*"))
