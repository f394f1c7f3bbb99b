"""What ranks with a GPU each run in tests: `python nccl_programs.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import driver
import numpy as np
from guide_scripts import scripts_under
from rank_process import train

import gpuopt
from gpuopt.distributed import Communicator, MPIGroup, NCCLGroup
from gpuopt.distributed.communicators.nccl import CHECKED_CALLS

LONG_S = 20.0
SHORT_S = 0.5


def train_on_gpus() -> Any:
    """Trains by the strategy that the guide's script makes."""
    script, _ = scripts_under("GPUs over NCCL")
    names: dict[str, Any] = {}
    exec(compile(script, "train.py", "exec"), names)
    return train(names["strategy"])


def leave_a_collective_out(group: MPIGroup) -> Any:
    """Rank 1 does not take part in a collective, whose GPUs wait while it waits in MPI."""
    ranks = NCCLGroup([f"gpu:{group.rank}"], group, SHORT_S)

    def run(rank: Communicator) -> str:
        import cupy

        with cupy.cuda.Device(rank.rank):
            array = cupy.ones(3, np.float32)
            for _ in range(CHECKED_CALLS):
                rank.all_reduce(array)
            if rank.rank == 0:
                rank.all_reduce(array)
                array.get()  # ends when the collective is given up
        try:
            rank.barrier() if rank.rank else rank.all_reduce(array)
        except (ValueError, gpuopt.DeadlineExceededError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return ranks.run(run)[0]


def main(folder: Path) -> None:
    group = MPIGroup(LONG_S)
    outcome = [train_on_gpus(), leave_a_collective_out(group)]
    reports = driver.take_reports() if driver.is_here() else []
    (folder / f"{group.rank}.json").write_text(json.dumps([*outcome, reports]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
