"""One rank of `bench.ranks`: `mpiexec -n N python -m bench.ranks_worker ROUNDS WORKLOAD...`.

Rank 0 prints a line of JSON for each workload: each contender's times in milliseconds, of which
each is that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import gpuopt
from bench.harness import take_samples
from gpuopt.bench.workloads import Workload
from gpuopt.distributed import MPIGroup
from gpuopt.step.replica_context import ReplicaContext, in_replica

Make = Callable[[gpuopt.MirroredStrategy, MPIGroup], Workload]

_TOY_FLOATS, _TOY_TABLE, _TOY_ROWS = 1000, (50, 8), 20
_TABLE, _ROWS = (100_000, 64), 10_000
_RATE = 0.01
_PAUSE_S = 20e-6


def make_step(strategy: gpuopt.MirroredStrategy, group: MPIGroup) -> Workload:
    """Makes the workload of a small model's step, by all ranks and by one alone."""
    rng = np.random.default_rng(group.rank)
    dense = rng.standard_normal(_TOY_FLOATS).astype(np.float32)
    rows = rng.standard_normal((_TOY_ROWS, _TOY_TABLE[1])).astype(np.float32)
    sparse = gpuopt.IndexedSlices(rows, rng.integers(0, _TOY_TABLE[0], _TOY_ROWS), _TOY_TABLE)

    def make(make_variable: Callable[..., Any]) -> Callable[[], None]:
        w = make_variable(np.zeros(_TOY_FLOATS, np.float32), name="w")
        table = make_variable(np.zeros(_TOY_TABLE, np.float32), name="table")
        optimizer = gpuopt.AdamOptimizer(_RATE)
        pairs = [(dense, w), (sparse, table)]
        return partial(optimizer.apply_gradients, pairs)

    alone = make(gpuopt.Variable)

    def step_alone() -> None:
        with in_replica(ReplicaContext()):
            alone()

    return Workload(
        f"a synchronous step of {group.size} ranks: Adam on {_TOY_FLOATS:,} floats and "
        f"{_TOY_ROWS} rows of {_TOY_TABLE}",
        {"gpuopt": make(strategy.variable), "one process": step_alone},
    )


def make_exchange(strategy: gpuopt.MirroredStrategy, group: MPIGroup) -> Workload:
    """Makes the workload of a call without any data, and of MPI's barrier, which checks nothing."""
    from mpi4py import MPI

    return Workload(
        f"the exchange of headers, over {group.size} ranks",
        {
            "gpuopt": lambda: strategy.communicator.barrier(),
            "MPI's barrier": MPI.COMM_WORLD.Barrier,
        },
    )


def make_all_reduce(
    strategy: gpuopt.MirroredStrategy,
    group: MPIGroup,
    *,
    megabytes: int,
    num_arrays: int,
) -> Workload:
    """Makes the workload of a batch of gradients, and the same by MPI's own collective."""
    from mpi4py import MPI

    size = megabytes * 2**20 // 4 // num_arrays
    rng = np.random.default_rng(group.rank)
    gradients = [rng.standard_normal(size).astype(np.float32) for _ in range(num_arrays)]
    bucket = np.empty(num_arrays * size, np.float32)
    parts = np.split(bucket, num_arrays)
    sums = [np.empty_like(gradient) for gradient in gradients]

    def by_hand() -> None:
        np.concatenate(gradients, out=bucket)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, bucket)
        for part, total in zip(parts, sums, strict=True):
            total[...] = part

    return Workload(
        f"batch_all_reduce of {num_arrays} arrays, {megabytes} MB of float32, "
        f"over {group.size} ranks",
        {
            "gpuopt": lambda: strategy.communicator.batch_all_reduce(gradients),
            "pack, Allreduce, unpack": by_hand,
        },
    )


def make_rows(strategy: gpuopt.MirroredStrategy, group: MPIGroup) -> Workload:
    """Makes the workload of many rows of a tall table, and their update by one process alone."""
    of_ranks = [_make_rows(rank) for rank in range(group.size)]
    every_row = gpuopt.IndexedSlices(
        np.concatenate([rows.values for rows in of_ranks]),
        np.concatenate([rows.indices for rows in of_ranks]),
        _TABLE,
    )
    mine = of_ranks[group.rank]
    mirrored = strategy.variable(np.zeros(_TABLE, np.float32), name="table")
    alone = gpuopt.Variable(np.zeros(_TABLE, np.float32), name="alone")
    optimizer = gpuopt.AdagradOptimizer(_RATE)
    optimizer_alone = gpuopt.AdagradOptimizer(_RATE)

    def step_alone() -> None:
        with in_replica(ReplicaContext()):
            optimizer_alone.apply_gradients([(every_row, alone)])

    return Workload(
        f"{group.size} ranks x {_ROWS:,} x {_TABLE[1]} rows gathered, merged and "
        "applied with Adagrad",
        {
            "gpuopt": lambda: optimizer.apply_gradients([(mine, mirrored)]),
            "one process with all rows": step_alone,
        },
    )


WORKLOADS: dict[str, Make] = {
    "exchange": make_exchange,
    "step": make_step,
    "all_reduce_1mb": partial(make_all_reduce, megabytes=1, num_arrays=16),
    "all_reduce_16mb": partial(make_all_reduce, megabytes=16, num_arrays=64),
    "rows": make_rows,
}


def main(rounds: int, names: Sequence[str]) -> None:
    group = MPIGroup()
    cores = sorted(os.sched_getaffinity(0))
    if group.size <= len(cores):
        # Two ranks on one core would be timed taking turns.
        os.sched_setaffinity(0, {cores[group.rank]})
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    from mpi4py import MPI

    def meet() -> None:
        # MPI's own barrier spins, and would take the core of a rank that is still in its step.
        request = MPI.COMM_WORLD.Ibarrier()
        while not request.Test():
            time.sleep(_PAUSE_S)

    def measure(name: str, workload: Workload) -> None:
        # All ranks begin each step together.
        samples = take_samples(replace(workload, settle=meet), rounds)
        of_ranks = strategy.communicator.all_gather(samples)
        if group.rank == 0:
            slowest = {
                name: np.max([of_rank[name] for of_rank in of_ranks], axis=0).tolist()
                for name in samples
            }
            found = {"name": f"ranks_{name}_of_{group.size}", "description": workload.description}
            print(json.dumps({**found, "samples": slowest}), flush=True)

    for name in names:
        strategy.run(measure, (name, WORKLOADS[name](strategy, group)))


def _make_rows(rank: int) -> gpuopt.IndexedSlices:
    rng = np.random.default_rng(rank)
    values = rng.standard_normal((_ROWS, _TABLE[1])).astype(np.float32)
    return gpuopt.IndexedSlices(values, rng.integers(0, _TABLE[0], _ROWS), _TABLE)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
