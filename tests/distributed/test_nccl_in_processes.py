"""Processes with a GPU each train over NCCL; what joins them otherwise is sockets, and no MPI."""

from __future__ import annotations

import driver
import pytest
from accumulating_ranks import expected_values
from rank_process import run_processes, train

import gpuopt
from gpuopt.distributed import NCCLGroup

pytestmark = pytest.mark.gpu


@pytest.mark.gpus(3)
def test_processes_train_on_gpus_to_the_same_bits() -> None:
    one, other = run_processes("train", [[0, 1], [2]], "nccl")
    bits = other["bits"]
    assert one["bits"] == [each for each in bits for _ in range(2)]
    assert one["step"] == other["step"] == 3  # of four, for each process leaves one out
    if driver.is_here():  # real GPUs may be joined otherwise, and add in another order
        devices = [f"gpu:{rank}" for rank in range(3)]
        strategy = gpuopt.MirroredStrategy(devices, group=NCCLGroup(devices))
        assert train(strategy)["bits"] == [each for each in bits for _ in range(3)]


@pytest.mark.gpus(3)
def test_processes_accumulate_on_gpus_and_reduce_their_sums() -> None:
    values = expected_values(3, range(3), range(3, 6), range(6, 8), divide=False)
    one, other = run_processes("accumulate", [[0, 1], [2]], "nccl")
    assert one == [2, 3, [each for each in values for _ in range(2)]]
    assert other == [2, 3, values]


@pytest.mark.gpus(2)
def test_a_process_that_is_killed_is_named_to_those_whose_gpus_wait() -> None:
    told, killed = run_processes("lose_a_gpu", [[0], [1]], "nccl")
    assert killed == -9
    assert told.startswith("rank 1 has failed: its process has ended; ")
    assert "all_reduce('sum') of float32[3] was not done" in told
