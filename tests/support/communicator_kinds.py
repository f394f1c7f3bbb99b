"""Groups of ranks for tests of what every communicator does.

In a process that `mpiexec` or `torchrun` started, all processes run the same tests side by side,
and each is one rank of a group over MPI or torch.distributed. In any other process, the ranks are
threads; where there are GPUs, also threads with a GPU each, whose arrays go over NCCL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_ranks import GpuRanks

from gpuopt.distributed import (
    Communicator,
    MPIGroup,
    RankGroup,
    SingleGroup,
    ThreadGroup,
    TorchGroup,
)

SHORT_S = 0.2
LONG_S = 20.0

# What a launcher tells a process: torchrun, Open MPI, or MPICH and others by PMI.
_SIZES = {"WORLD_SIZE": "torch", "OMPI_COMM_WORLD_SIZE": "mpi", "PMI_SIZE": "mpi"}
# The kind of the process's job, and its size; 0 for a process of no job.
JOB_KIND, JOB_SIZE = next(
    ((kind, int(os.environ[name])) for name, kind in _SIZES.items() if os.environ.get(name)),
    ("", 0),
)


@cache
def gpu_ranks(size: int, timeout_s: float) -> GpuRanks:
    return GpuRanks(size, timeout_s)


GROUPS: dict[str, Callable[[int, float], RankGroup]] = {
    "single": lambda size, timeout_s: SingleGroup(),
    "threads": ThreadGroup,
    "nccl": gpu_ranks,
}
# Of a group whose size a test chooses.
MOST_RANKS = 3

# Of several ranks.
NAMES_OF_KINDS = [JOB_KIND] if JOB_SIZE else ["threads", "nccl"]
SIZES = sorted({size for size in (2, JOB_SIZE or 5) if size <= (JOB_SIZE or size)})
KINDS_AND_NUMBERS = [
    *([] if JOB_SIZE else [("single", 1)]),
    *((kind, size) for kind in NAMES_OF_KINDS for size in SIZES),
]


def with_marks(kind: str, *parameters: Any, ranks: int) -> Any:
    """Returns a test's parameters, of which the first is a kind, for groups of up to `ranks`."""
    marks: list[pytest.MarkDecorator] = []
    if kind == "nccl":
        marks = [pytest.mark.gpu, *([pytest.mark.gpus(ranks)] if ranks > 1 else [])]
    return pytest.param(kind, *parameters, marks=marks)


KINDS = [with_marks(kind, ranks=MOST_RANKS) for kind in NAMES_OF_KINDS]
KINDS_AND_SIZES = [with_marks(kind, size, ranks=size) for kind, size in KINDS_AND_NUMBERS]


def same_sums(kind: str, size: int, results: list[Any], expected: Any) -> bool:
    """Says whether sums are those of a sequential replay, to the last bit.

    NCCL adds in an order of its own. Sums of three and more floating-point numbers must then be the
    same on all ranks, and almost those of the replay.
    """
    if kind != "nccl" or size < 3 or expected.dtype.kind in "iu":
        return all(result.tobytes() == expected.tobytes() for result in results)
    eps = float(ml_dtypes.finfo(expected.dtype).eps)
    largest = max(1.0, float(abs(expected).max()))
    near = np.allclose(
        results[0].astype(np.float64), expected.astype(np.float64), rtol=0, atol=9 * eps * largest
    )
    return near and all(result.tobytes() == results[0].tobytes() for result in results)


def run_on_ranks(
    kind: str, size: int, function: Callable[[Communicator], Any], timeout_s: float = LONG_S
) -> list[Any]:
    """Runs the function on every rank; returns what each returned or raised, in rank order.

    In a job, every process gets all outcomes: its own, and copies of the others'.
    """

    def run(communicator: Communicator) -> Any:
        try:
            return function(communicator)
        except Exception as error:
            return error

    if kind in GROUPS:
        return GROUPS[kind](size, timeout_s).run(run)
    skip_in_smaller_job(size)
    outcome, ended_by = None, None
    if everyone().rank < size:
        try:
            [outcome] = first_ranks(size, timeout_s).run(run)
        except BaseException as error:
            ended_by = error
    outcomes = everyone_gathers((outcome, ended_by))[:size]
    for _, error in outcomes:
        if error is not None:
            raise error
    return [outcome for outcome, _ in outcomes]


def succeeded(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def group_of(kind: str, size: int) -> RankGroup | None:
    """Returns a group; None if this process has none of its ranks."""
    if kind in GROUPS:
        return GROUPS[kind](size, LONG_S)
    skip_in_smaller_job(size)
    return first_ranks(size, LONG_S) if everyone().rank < size else None


def is_here(kind: str, rank: int) -> bool:
    """Whether a rank runs in this process."""
    return kind in GROUPS or everyone().rank == rank


def meeting_of(kind: str, size: int) -> Callable[[], Any]:
    """Returns a function that waits until all ranks have called it, whatever their group does."""
    if kind in GROUPS:
        return threading.Barrier(size, timeout=LONG_S).wait
    skip_in_smaller_job(size)
    return lambda: _ranks(size, LONG_S, "meeting").run(lambda communicator: communicator.barrier())


def skip_in_smaller_job(size: int) -> None:
    if size > JOB_SIZE:
        pytest.skip(f"it needs {size} ranks, and the job has {JOB_SIZE}")


@cache
def everyone() -> Any:
    if JOB_KIND == "mpi":
        return MPIGroup(3 * LONG_S)
    group: Any = TorchGroup(3 * LONG_S)
    from torch import distributed

    # All processes of a job make each group of torch's.
    sizes = range(1, JOB_SIZE + 1)
    group.of_size = {size: distributed.new_group(range(size)) for size in sizes}
    return group


def everyone_gathers(value: Any) -> list[Any]:
    [values] = everyone().run(lambda communicator: communicator.all_gather(value))
    return values


def first_ranks(size: int, timeout_s: float) -> Any:
    return _ranks(size, timeout_s, "tested")


@cache
def _ranks(size: int, timeout_s: float, purpose: str) -> Any:
    """Makes a group of the first processes of the job; only these may call it, in one order."""
    group: Any
    if JOB_KIND == "torch":
        group = TorchGroup(LONG_S, everyone().of_size[size])
        group._meeting.timeout_s = timeout_s  # of its runs, and not of its start
        return group
    from mpi4py import MPI

    of_some = MPI.COMM_WORLD.Get_group().Incl(range(size))
    group = MPIGroup(LONG_S, MPI.COMM_WORLD.Create_group(of_some))
    group._exchange._timeout_s = timeout_s
    return group
