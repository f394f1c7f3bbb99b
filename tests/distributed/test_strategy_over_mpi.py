"""MirroredStrategy over the processes of mpiexec or torchrun does what it does over threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from accumulating_ranks import expected_values
from mpi_job import TORCHRUN, run_job, why_no_network
from mpi_programs import PROGRAMS, clipped_steps, outcomes, uneven_steps
from mpi_programs import __file__ as program_file
from rank_process import train

import gpuopt

# What starts a job, less the number of its ranks.
LAUNCHERS = [
    pytest.param(None, marks=pytest.mark.mpi, id="mpiexec"),
    pytest.param(TORCHRUN, marks=pytest.mark.torch, id="torchrun"),
]


@pytest.fixture(scope="module", params=LAUNCHERS)
def start(request: pytest.FixtureRequest) -> Sequence[str] | None:
    if reason := why_no_network():
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module", params=[2, 3, 4])
def trained(
    request: pytest.FixtureRequest,
    start: Sequence[str] | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Any]:
    """What each rank of a job has got by training."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_programs(folder, ["train_mirrored"], request.param, start)


@pytest.fixture(scope="module")
def folder(start: Sequence[str] | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three ranks have written the outcomes of all other programs."""
    folder = tmp_path_factory.mktemp("ranks")
    run_programs(folder, [name for name in PROGRAMS if name != "train_mirrored"], 3, start)
    return folder


def run_programs(
    folder: Path, names: list[str], num_ranks: int, start: Sequence[str] | None
) -> list[Any]:
    job = run_job(num_ranks, program_file, folder, *names, start=start)
    assert job.status == 0, job
    return outcomes(folder, names[0])


def test_processes_train_to_the_same_bits_as_one(trained: list[Any]) -> None:
    num_ranks = len(trained)
    together = train(gpuopt.MirroredStrategy(["cpu"] * num_ranks))
    bits = together["bits"][::num_ranks]
    for rank, outcome in enumerate(trained):
        assert outcome == {"replicas": [[rank, 0]], "step": together["step"], "bits": bits}


def test_variables_begin_with_the_values_of_rank_0(folder: Path) -> None:
    expected = [[[0.0] * 3] * 2, 0.0]
    assert outcomes(folder, "take_values_of_rank_0") == [expected] * 3


def test_processes_that_make_other_variables_are_told_by_name(folder: Path) -> None:
    for error in outcomes(folder, "make_other_variables"):
        assert 'variable "w" of float64[2] on rank 0' in error
        assert 'variable "w" of float64[3] on rank 1' in error


def test_a_rank_without_a_gradient_or_with_rows_is_an_error_on_all(folder: Path) -> None:
    for [no_gradient, rows], total in outcomes(folder, "bring_other_gradients"):
        assert "['a by ndarray', 'b by ndarray']" in no_gradient
        assert "with ['b by ndarray'], rule" in no_gradient
        assert "as [float32[4, 2]] by 'sum'" in no_gradient
        assert "on rank 1, 2" in no_gradient
        assert "['a by IndexedSlices', 'b by ndarray']" in rows
        assert total == 0


def test_uneven_batches_count_by_their_examples(folder: Path) -> None:
    together = uneven_steps(gpuopt.MirroredStrategy(["cpu"] * 3))
    assert len(set(together)) == 1
    assert outcomes(folder, "train_on_uneven_batches") == [together[:1]] * 3


def test_ranks_stay_equal_when_one_fails_alone_and_all_go_on(folder: Path) -> None:
    failed = "KeyError: 'lost'"
    values = [[-float(x)] * 3 for x in (3, 3, 7.5, 12.75, 12.75, 18.375)]
    for rank, outcome in enumerate(outcomes(folder, "fail_alone")):
        errors, got = zip(*outcome, strict=True)
        assert list(got) == values, outcome
        assert errors[0] == errors[2] == errors[5] == "nothing", errors
        if rank == 1:
            assert errors[1] == errors[3] == failed
        else:
            assert errors[1] == f"WorkerFailedError: rank 1 has failed: {failed}"
            assert errors[3] == "nothing"
        # The others know of no failure, and would compare nothing: no rank updates.
        assert "comparing values" in errors[4]


def test_all_ranks_clip_alike(folder: Path) -> None:
    [first, *others] = outcomes(folder, "clip_alike")
    assert others == [first] * 2


def test_all_ranks_clip_in_the_step_as_the_replicas_of_one_process(folder: Path) -> None:
    norms, bits = clipped_steps(gpuopt.MirroredStrategy(["cpu"] * 3))
    assert len(set(bits)) == 1
    assert min(norms) > 10
    assert outcomes(folder, "clip_in_the_step") == [[norms, bits[:1]]] * 3


def test_one_rank_writes_the_checkpoint_that_all_restore(folder: Path) -> None:
    [(path, bits, expected), *others] = outcomes(folder, "save_and_restore")
    assert others == [[path, bits, expected]] * 2
    assert bits == expected
    assert sorted(file.name for file in folder.glob("model*")) == [Path(path).name]


def test_processes_accumulate_gradients_and_reduce_their_sums(folder: Path) -> None:
    updates = range(3), range(3, 6), range(6, 8)
    expected = [2, 3, expected_values(3, *updates, divide=False)]
    assert outcomes(folder, "accumulate_gradients") == [expected] * 3
