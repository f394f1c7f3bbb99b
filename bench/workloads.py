"""All workloads of `python -m bench`."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch

from bench import (
    autodiff,
    averages,
    catch_up,
    clipping,
    mixed_precision,
    slot_bits,
    step_path,
)
from bench.checkpoints import delay_by_checkpoint, restore_checkpoint, save_checkpoint
from bench.harness import Workload
from bench.host_workloads import make_host_workloads
from bench.rows import append_rows


def make_workloads(pattern: str = "*") -> Iterator[Workload]:
    """Yields each workload when its turn comes, so that only one at a time is in memory.

    Args:
        pattern: Yields the workloads whose names match.
    """
    # First, because making one of these writes to the disk, or takes gigabytes.
    for make in (
        save_checkpoint,
        delay_by_checkpoint,
        restore_checkpoint,
        append_rows,
        slot_bits.slot_bits_movement,
        mixed_precision.slot_dtype_movement,
        mixed_precision.demo_in_float16,
    ):
        if fnmatch(make.__name__, pattern):
            yield make()
    modules = (autodiff.make_workloads, step_path.make_workloads)
    of_rules = (
        averages.make_workloads,
        catch_up.make_workloads,
        clipping.make_workloads,
        slot_bits.make_workloads,
        mixed_precision.make_workloads,
        make_host_workloads,
    )
    for others in (*modules, *of_rules):
        yield from (workload for workload in others() if fnmatch(workload.name, pattern))
