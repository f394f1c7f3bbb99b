"""A process knows its job from its launcher, and does not train alone by mistake."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import gpuopt
from gpuopt.distributed import MPIGroup, NCCLGroup, SingleGroup, ThreadGroup
from gpuopt.distributed.communicators import launcher, mpi
from gpuopt.distributed.communicators.launcher import place_in_job

pytestmark = pytest.mark.contract

_OF_TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4"}

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
        (_OF_TORCHRUN, (3, 4)),
        # torchrun on each host, which Slurm has started.
        ({**_OF_SRUN, **_OF_TORCHRUN}, (3, 4)),
        # Some programs set it for themselves.
        ({"WORLD_SIZE": "4"}, (0, 1)),
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
    start_in(told, monkeypatch)
    found = place_in_job()
    assert (found.rank, found.size) == place


def start_in(told: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets what a launcher would have set, and no more."""
    for name in os.environ:
        if name.startswith(("OMPI_COMM_", "PMI_", "SLURM_")) or name in _OF_TORCHRUN:
            monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "_has_warned", False)


several = pytest.mark.parametrize(
    ("told", "shown"),
    [
        (_OF_TORCHRUN, "4 (WORLD_SIZE=4, RANK=3)"),
        (_OF_SRUN, "8 (SLURM_STEP_NUM_TASKS=8, SLURM_PROCID=5)"),
    ],
)


@several
def test_a_group_of_one_process_is_refused_in_a_job_of_several(
    told: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_in(told, monkeypatch)
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1))
    monkeypatch.setattr(mpi, "import_mpi", lambda timeout_s: alone)
    for make in (MPIGroup, lambda: NCCLGroup(["gpu:0"])):
        with pytest.raises(RuntimeError) as error:
            make()
        assert f"finds 1 process, but the environment shows {shown}" in str(error.value)
        assert "SingleGroup()" in str(error.value)
        assert ". " not in str(error.value)


@pytest.mark.parametrize("told", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_job_of_one_is_neither_refused_nor_warned_of(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_in(told, monkeypatch)
    gpuopt.MirroredStrategy(["cpu"])  # pytest makes errors of warnings
    with pytest.raises(gpuopt.DeviceUnavailableError):
        NCCLGroup(["gpu:99"])


def step_of(strategy: gpuopt.MirroredStrategy) -> list[float]:
    variable = strategy.variable(np.zeros(1, np.float32))
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    gradient = np.ones(1, np.float32)
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable.local)]))
    return variable.numpy().tolist()


@several
def test_a_strategy_of_local_devices_warns_once_in_a_job_of_several(
    told: dict[str, str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [rank] = {"RANK", "SLURM_PROCID"} & told.keys()
    start_in({**told, rank: "0"}, monkeypatch)
    number, _, rest = shown.partition(" ")
    with pytest.warns(gpuopt.SeveralProcessesWarning) as warned:
        strategy = gpuopt.MirroredStrategy(["cpu"])
    gpuopt.MirroredStrategy(["cpu", "cpu"])  # pytest makes errors of warnings
    [warning] = warned
    assert warning.filename == __file__
    message = str(warning.message)
    assert f"shows {number} processes {rest.rpartition('=')[0]}=0)" in message
    assert step_of(strategy) == [-1.0]


def test_only_rank_0_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    start_in(_OF_MPICH, monkeypatch)
    gpuopt.MirroredStrategy(["cpu"])  # pytest makes errors of warnings


def test_what_is_meant_to_be_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    start_in({**_OF_OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step_of(gpuopt.MirroredStrategy(["cpu"], group=SingleGroup())) == [-1.0]
        assert step_of(gpuopt.MirroredStrategy(["cpu"] * 2, group=ThreadGroup(2))) == [-2.0]
        w = np.zeros(1, np.float32)
        gpuopt.GradientDescentOptimizer(1.0).apply_gradients([(np.ones(1, np.float32), w)])
        assert w.tolist() == [-1.0]
