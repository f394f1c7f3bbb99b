"""Jobs that torchrun starts: they do what all communicators do, and end as promised."""

from __future__ import annotations

from functools import partial

import pytest
from mpi_job import ROOT, TORCHRUN
from mpi_job import run_job as start_job

pytestmark = pytest.mark.torch

run_job = partial(start_job, start=TORCHRUN)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_every_communicator_does_is_done_over_gloo(num_ranks: int) -> None:
    tests = ROOT / "tests" / "distributed" / "test_communicator.py"
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    job = run_job(num_ranks, "-m", "pytest", *options, tests)
    assert job.status == 0, job
    assert job.output.count(" passed") == num_ranks, job
