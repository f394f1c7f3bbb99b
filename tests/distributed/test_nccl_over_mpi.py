"""The processes of a job train on a GPU each: NCCL's ids, and what it cannot do, go over MPI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mpi_job import ROOT, run_job
from nccl_programs import __file__ as program_file

from gpuopt.backends.cuda.availability import ask_driver

pytestmark = pytest.mark.mpi

# Where CuPy is, beside which there is no MPI.
CUPY = Path(os.environ.get("GPUOPT_CUPY", "nowhere"))
NUM_RANKS = 2


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has got: by training, of a collective that one leaves out, and reports."""
    if not (CUPY / "cupy").exists():
        pytest.skip("CuPy is not installed: see make test-ranks")
    num_gpus = len(ask_driver().gpus)
    if 0 < num_gpus < NUM_RANKS:
        pytest.skip(f"{NUM_RANKS} ranks need a GPU each, and there are {num_gpus}")
    folder = tmp_path_factory.mktemp("ranks")
    driver = [] if num_gpus else [ROOT / "tests" / "support" / "driver"]
    job = run_job(NUM_RANKS, *driver, program_file, folder, packages=CUPY)
    assert job.status == 0, job
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def test_processes_train_on_gpus_to_the_same_bits(outcomes: list[Any]) -> None:
    first, second = (trained for trained, _, _ in outcomes)
    assert first["replicas"] == [[0, 0]]
    assert second["replicas"] == [[1, 0]]
    assert first["step"] == second["step"] == 3
    assert first["bits"] == second["bits"]
    assert not any(reports for _, _, reports in outcomes)


def test_who_waits_for_another_in_a_gpu_says_what_the_other_does(outcomes: list[Any]) -> None:
    (_, first, _), (_, second, _) = outcomes
    assert first.startswith("DeadlineExceededError: all_reduce('sum') of float32[3] was not done ")
    assert "barrier on rank 1" in first
    assert second.startswith("ValueError: all ranks must make the same call")
    assert "a collective that was not done on rank 0" in second
