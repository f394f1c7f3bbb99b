"""Jobs that torchrun starts: they do what all communicators do, and end as promised."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from guide_scripts import scripts_under
from mpi_job import (
    ROOT,
    TORCHRUN,
    check_that_a_forked_child_is_no_rank,
    run_alone,
    why_no_network,
)
from mpi_job import run_job as start_job

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def network() -> None:
    if reason := why_no_network():
        pytest.skip(reason)


run_job = partial(start_job, start=TORCHRUN)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_what_every_communicator_does_is_done_over_gloo(num_ranks: int) -> None:
    tests = ROOT / "tests" / "distributed" / "test_communicator.py"
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    job = run_job(num_ranks, "-m", "pytest", *options, tests)
    assert job.status == 0, job
    assert job.output.count(" passed") == num_ranks, job


def test_the_guides_script_trains_under_torchrun(tmp_path: Path) -> None:
    [script] = scripts_under("Under torchrun")
    file = tmp_path / "train.py"
    file.write_text(script)
    job = run_job(2, file, folder=tmp_path)
    assert job.status == 0, job
    [values] = re.findall(r"\[(.*)\]", job.output)
    assert [float(value) for value in values.split()] == pytest.approx([1, -2, 3, 0.5], abs=0.5)
    assert job.errors.count("gpuopt: rank 1 is process") == 1, job


def test_a_program_that_has_a_group_of_torchs_gets_one_of_its_own() -> None:
    program = """
import numpy as np
import torch
from torch import distributed
from gpuopt.distributed import TorchGroup

distributed.init_process_group("gloo")
whole, other = TorchGroup(20), TorchGroup(20)
odd = distributed.new_group([1, 2])
mine = torch.ones(3)
distributed.all_reduce(mine)
array = np.ones(3000, np.float32)

def train(communicator):
    [nested] = other.run(lambda inner: inner.all_reduce(array))
    distributed.all_reduce(mine)
    return communicator.all_reduce(nested).sum() / 3000

print(whole.run(train), mine.sum().item())
if distributed.get_rank() > 0:
    part = TorchGroup(20, odd)
    print(part.rank, part.size, part.run(lambda each: each.all_gather(each.rank)))
"""
    job = run_job(3, "-c", program)
    assert job.status == 0, job
    assert job.output.count("[np.float32(9.0)] 27.0") == 3, job
    assert "0 2 [[0, 1]]" in job.output
    assert "1 2 [[0, 1]]" in job.output


def test_a_process_of_no_job_is_a_group_of_one() -> None:
    program = (
        "from gpuopt.distributed import *; print(TorchGroup(9).run(lambda c: c.all_gather(1)))"
    )
    assert run_alone(program, is_quiet=False) == "[[1]]"


def test_a_group_of_one_process_is_refused_in_a_job_of_several() -> None:
    program = """
from torch import distributed
from gpuopt.distributed import TorchGroup

store = distributed.HashStore()
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
try:
    TorchGroup()
except RuntimeError as error:
    print(error)
"""
    job = run_job(2, "-c", program)
    assert job.status == 0, job
    assert job.output.count("TorchGroup finds 1 process, but the environment shows 2") == 2, job


def test_a_forked_child_is_no_rank() -> None:
    check_that_a_forked_child_is_no_rank("TorchGroup(9)")


def test_an_exception_in_a_rank_ends_the_job_and_is_told_to_the_others() -> None:
    program = """
from gpuopt.distributed import TorchGroup

def train(communicator):
    communicator.barrier()
    if communicator.rank == 1:
        raise KeyError("lost")
    communicator.barrier("the next step")

TorchGroup(60).run(train)
"""
    job = run_job(3, "-c", program)
    assert job.status != 0, job
    assert job.seconds < 45, job
    assert "KeyError: 'lost'" in job.errors
    assert "WorkerFailedError: rank 1 has failed: KeyError: 'lost'" in job.errors


def test_what_is_left_in_the_store_does_not_grow_with_the_calls() -> None:
    program = """
from gpuopt.distributed import TorchGroup

group = TorchGroup(20)
store = group._meeting._store
counts = []
for number in (10, 200):
    for _ in range(number):
        group.run(lambda each: [each.barrier(), each.all_gather(each.rank)])
    group.run(lambda each: counts.append(store.num_keys()))
print(counts[1] - counts[0] <= 12, counts)
"""
    job = run_job(3, "-c", program)
    assert job.status == 0, job
    assert job.output.count("True") == 3, job
