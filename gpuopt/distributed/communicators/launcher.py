"""Rank and size of a job from its launcher's environment variables, before MPI or torch start."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

from gpuopt.errors import SeveralProcessesWarning
from gpuopt.step.misuse import num_frames_of_package

# The variables of a process's rank and of the number of ranks: those of torchrun, which Slurm or
# mpiexec may start on each host; of Open MPI; of MPICH, also in Intel's MPI and others; and of
# srun, which may start any of these. A batch script that srun has not started has Slurm's other
# variables, but not the number of tasks in its step.
_PLACES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


class Place(NamedTuple):
    """A process's place in a job.

    Attributes:
        rank: From 0 to `size - 1`.
        size: How many processes there are.
        variables: The names of the environment variables of rank and size; "" for a process of no
            job.
    """

    rank: int = 0
    size: int = 1
    variables: tuple[str, str] = ("", "")


def place_in_job() -> Place:
    """Returns this process's place; rank 0 of 1 without a launcher.

    If a process of one job has started another job, the inner job counts.
    """
    for names in _PLACES:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal():
            return Place(int(rank), int(size), names)
    return Place()


def refuse_if_alone(what: str, size: int, advice: str) -> None:
    """Raises RuntimeError if a group has one process, and the environment shows several.

    Each of them would train a model of its own. The subject of the error, `what`, is the group's
    class, or the library that counted processes.
    """
    place = place_in_job()
    if size == 1 < place.size:
        raise RuntimeError(
            f"{what} finds 1 process, but the environment shows {place.size} "
            f"({_describe(place)}), each of which would train a model of its own: {advice}, or "
            "pass SingleGroup() if that is meant"
        )


def warn_if_local(what: str) -> None:
    """Warns, once in a process and in rank 0 alone, that each process trains by itself."""
    global _has_warned
    place = place_in_job()
    if place.size > 1 and place.rank == 0 and not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{what} without a group trains in this process alone, but the environment shows "
            f"{place.size} processes ({_describe(place)}), each of which trains a model of its "
            "own: pass group=MPIGroup() or group=TorchGroup(), or, if that is meant, SingleGroup() "
            "or ThreadGroup(number_of_devices)",
            SeveralProcessesWarning,
            stacklevel=num_frames_of_package(),
        )


_has_warned = False


def _describe(place: Place) -> str:
    rank, size = place.variables
    return f"{size}={place.size}, {rank}={place.rank}"
