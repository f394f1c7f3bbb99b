"""What a launcher tells each process of its job, before MPI is started."""

from __future__ import annotations

import os

# Where launchers say which rank a process is, and how many there are: Open MPI's; MPICH's, which
# Intel's and others follow; and srun, which may start any MPI. A batch script that srun has not
# started has Slurm's other variables, but not the number of tasks in its step.
_PLACES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def place_in_job() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks: (0, 1) if it is of no job."""
    for rank, size in _PLACES:
        told = os.environ.get(rank, ""), os.environ.get(size, "")
        if all(map(str.isdecimal, told)):
            return int(told[0]), int(told[1])
    return 0, 1
