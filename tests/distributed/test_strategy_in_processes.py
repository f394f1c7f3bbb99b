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


def test_processes_that_differ_in_settings_or_values_are_told_and_update_nothing() -> None:
    [first, second] = run_processes("differ_in_one_process", [[0, 1], [2]])
    assert first == second
    for error, texts in zip(
        first,
        [
            ("learning_rate 0.5,", "learning_rate 0.25,"),
            ("on_nonfinite 'propagate'", "on_nonfinite 'skip'"),
            ("learning_rate 0.5, on", "groups {'slow': {'learning_rate': 0.1"),
            ("global step 0", "no global step"),
            None,
            None,
            ("beta1_power 0.72", "beta1_power 0.80"),
            ("global step 2", "global step 1"),
            ("none on rank 0, 1", 'slot "accumulator" of'),
            ("values with digest", "on rank 0, 1; values with digest"),
            None,
            None,
            ("values with digest", "on rank 0, 1; values with digest"),
        ],
        strict=True,
    ):
        if texts is None:
            assert error == "nothing"
        else:
            assert error.startswith("all ranks must"), error
            assert all(text in error for text in texts), error


def test_a_process_that_is_killed_is_named_to_the_others() -> None:
    named = "rank 2 has failed: its process has ended"
    assert run_processes("lose_a_process", [[0], [1], [2]]) == [named, named, -9]
