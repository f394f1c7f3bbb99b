"""The jobs that are timed, and what a user would take instead of gpuopt."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch

from bench import autodiff, distributed
from bench.checkpoints import delay_by_checkpoint, restore_checkpoint, save_checkpoint
from bench.harness import Workload
from bench.host_workloads import host_workloads


def workloads(pattern: str = "*") -> Iterator[Workload]:
    """Makes each workload when its turn has come, so that only one is in memory.

    Args:
        pattern: Of the names of those that are wanted.
    """
    # These write to the disk to begin with.
    for make in (save_checkpoint, delay_by_checkpoint, restore_checkpoint):
        if fnmatch(make.__name__, pattern):
            yield make()
    for others in (autodiff.workloads, distributed.workloads, host_workloads):
        yield from (workload for workload in others() if fnmatch(workload.name, pattern))
