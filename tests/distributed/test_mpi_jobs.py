"""Jobs that mpiexec starts: they do what all communicators do, and end as promised."""

from __future__ import annotations

import pytest
from mpi_job import ROOT, run_job

pytestmark = pytest.mark.mpi


def test_a_job_has_no_network_but_the_loopback_device() -> None:
    job = run_job(1, "-c", "import socket; print([name for _, name in socket.if_nameindex()])")
    assert job.output.strip() == "['lo']", job


def test_what_every_communicator_does_is_done_over_mpi() -> None:
    tests = ROOT / "tests" / "distributed" / "test_communicator.py"
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    job = run_job(3, "-m", "pytest", *options, tests)
    assert job.status == 0, job
    assert job.output.count(" passed") == 3, job
