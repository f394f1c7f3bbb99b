"""A process knows from its launcher which rank it is, before MPI is started."""

from __future__ import annotations

import os

import pytest

from gpuopt.distributed.communicators.launcher import place_in_job

_OF_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
_OF_MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3"}
_OF_SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
_OF_A_BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("told", "place"),
    [
        (_OF_OPEN_MPI, (1, 4)),
        (_OF_MPICH, (2, 3)),
        (_OF_SRUN, (5, 8)),
        # mpiexec in a step of Slurm's: the inner job counts.
        ({**_OF_SRUN, **_OF_OPEN_MPI}, (1, 4)),
        ({**_OF_SRUN, **_OF_MPICH}, (2, 3)),
        (_OF_A_BATCH_SCRIPT, (0, 1)),
        ({"PMI_RANK": "", "PMI_SIZE": "many"}, (0, 1)),
        ({}, (0, 1)),
    ],
)
def test_a_launcher_tells_rank_and_size(
    told: dict[str, str], place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ:
        if name.startswith(("OMPI_COMM_", "PMI_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert place_in_job() == place
