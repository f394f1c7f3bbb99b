"""A strategy over several processes does what it does in one."""

from __future__ import annotations

import pytest
from rank_process import run_processes, train

import gpuopt


@pytest.mark.parametrize("ranks_of_processes", [[[0], [1], [2]], [[0, 1], [2]]], ids=str)
def test_processes_train_to_the_same_bits_as_one(ranks_of_processes: list[list[int]]) -> None:
    together = train(gpuopt.MirroredStrategy(["cpu"] * 3))
    assert together["step"] == 3  # of four, for each process leaves one out
    num_kinds = 4  # copies and slots of two variables
    bits = [together["bits"][3 * kind] for kind in range(num_kinds)]
    for ranks, outcome in zip(
        ranks_of_processes, run_processes("train", ranks_of_processes), strict=True
    ):
        assert outcome["replicas"] == [[rank, place] for place, rank in enumerate(ranks)]
        assert outcome["step"] == 3
        assert outcome["bits"] == [each for each in bits for _ in ranks]


def test_an_update_that_fails_in_one_process_is_an_error_in_all() -> None:
    error = "ZeroDivisionError: no rate"
    assert run_processes("fail_in_one_process", [[0, 1], [2]]) == [
        error,
        "WorkerFailedError: rank 0 has failed in the update of apply_gradients of "
        f"Failing with ['w by ndarray']: {error}",
    ]


def test_a_process_that_is_killed_is_named_to_the_others() -> None:
    named = "rank 2 has failed: its process has ended"
    assert run_processes("lose_a_process", [[0], [1], [2]]) == [named, named, -9]
