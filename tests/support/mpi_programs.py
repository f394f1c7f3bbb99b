"""What the ranks of a job run in tests: `python mpi_programs.py FOLDER PROGRAM...`.

The job is of mpiexec or of torchrun.

A program gets the group and a folder; what it returns is written there by each rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accumulating_ranks import accumulate
from rank_process import train

import gpuopt
from gpuopt.distributed import MPIGroup, TorchGroup

TIMEOUT_S = 20.0

Group = MPIGroup | TorchGroup


def outcomes(folder: Path, program: str) -> list[Any]:
    """Reads what a program has returned in each rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{program}.*.json"))]


def workers_and_chief(folder: Path, program: str) -> tuple[Any, list[Any]]:
    """Reads what a program has returned in rank 0, and in the others."""
    chief, *workers = outcomes(folder, program)
    return chief, workers


def same_of_all(folder: Path, program: str) -> Any:
    """Reads what a program has returned alike in all ranks."""
    chief, workers = workers_and_chief(folder, program)
    assert workers == [chief] * len(workers)
    return chief


def train_mirrored(group: Group, folder: Path) -> Any:
    return train(gpuopt.MirroredStrategy(["cpu"], group=group))


def take_values_of_rank_0(group: Group, folder: Path) -> Any:
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    w = strategy.variable(np.full((2, 3), float(group.rank), np.float32), name="w")
    w16 = strategy.variable(np.full(3000, group.rank, np.float16), name="w16")
    return w.numpy().tolist(), w16.numpy().sum().item()


def make_other_variables(group: Group, folder: Path) -> Any:
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    try:
        strategy.variable(np.zeros(2 + group.rank), name="w")
    except ValueError as error:
        return str(error)
    return "nothing"


def bring_other_gradients(group: Group, folder: Path) -> Any:
    """One rank brings no gradient, or rows, where the other one brings an array."""
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    a = strategy.variable(np.zeros((4, 2), np.float32), name="a")
    b = strategy.variable(np.zeros((4, 2), np.float32), name="b")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)
    dense = np.ones((4, 2), np.float32)
    rows = gpuopt.IndexedSlices(dense[:1], np.array([1]), (4, 2))
    others = None, rows

    def apply(other: Any) -> str:
        gradient = dense if group.rank == 0 else other
        try:
            optimizer.apply_gradients([(gradient, a.local), (dense, b.local)])
        except ValueError as error:
            return str(error)
        return "nothing"

    errors = [strategy.run(apply, (other,)).values[0] for other in others]
    return errors, a.numpy().sum().item()


def train_on_uneven_batches(group: Group, folder: Path) -> Any:
    """Ten examples: three, three and four of them."""
    strategy = gpuopt.MirroredStrategy(["cpu"] * group.local_size, group=group)
    return uneven_steps(strategy)


def uneven_steps(strategy: gpuopt.MirroredStrategy) -> list[str]:
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    optimizer = gpuopt.AdamOptimizer(0.1)
    inputs = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)

    def train_replica() -> None:
        rank, size = strategy.communicator.rank, strategy.communicator.size
        mine = inputs[rank * 10 // size : (rank + 1) * 10 // size]
        weight = strategy.weight_of(len(mine))
        loss = lambda: weight * ((mine @ w.local - 1) ** 2).mean()  # noqa: E731
        optimizer.minimize(loss, var_list=[w.local])

    for _ in range(3):
        strategy.run(train_replica)
    return [copy.numpy().tobytes().hex() for copy in w.replicas]


def fail_alone(group: Group, folder: Path) -> Any:
    """Rank 1 raises before its step, and in another run after it; all go on."""
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    w = strategy.variable(np.zeros(3, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(1.0, 0.5)

    def train_replica(fails: str) -> None:
        fails = fails if group.rank == 1 else ""
        if fails == "before":
            raise KeyError("lost")
        optimizer.apply_gradients([(np.ones(3, np.float32), w.local)])
        if fails == "after":
            raise KeyError("lost")

    outcomes = []
    for fails in ("", "before", "", "after", "", ""):
        try:
            strategy.run(train_replica, (fails,))
        except Exception as error:
            outcomes.append([f"{type(error).__name__}: {error}", w.numpy().tolist()])
        else:
            outcomes.append(["nothing", w.numpy().tolist()])
        group.run(lambda communicator: communicator.barrier())
    return outcomes


def clip_alike(group: Group, folder: Path) -> Any:
    """Every rank clips the sums by their norm, which is the same everywhere."""
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    w = strategy.variable(np.zeros(999, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9)

    def train_replica() -> None:
        for number in range(3):
            rng = np.random.default_rng((number, group.rank))
            gradient = rng.standard_normal(999).astype(np.float32)
            [total] = strategy.communicator.batch_all_reduce([gradient])
            norm = np.sqrt(np.square(total).sum())
            clipped = total * np.float32(min(1.0, 10.0 / norm))
            optimizer.apply_gradients([(clipped, w.local)], skip_gradients_aggregation=True)

    strategy.run(train_replica)
    return w.numpy().tobytes().hex()


def clip_in_the_step(group: Group, folder: Path) -> Any:
    return clipped_steps(gpuopt.MirroredStrategy(["cpu"], group=group))


def clipped_steps(strategy: gpuopt.MirroredStrategy) -> Any:
    """Clips the sums in three steps; a fourth one, with NaN of one replica, is left out by all."""
    w = strategy.variable(np.zeros(999, np.float32), name="w")
    optimizer = gpuopt.MomentumOptimizer(0.1, 0.9, clip_norm=10.0, on_nonfinite="skip")
    norms = []

    def train_replica(number: int) -> None:
        rank = strategy.communicator.rank
        gradient = np.random.default_rng((number, rank)).standard_normal(999).astype(np.float32)
        if number == 3 and rank == 1:
            gradient[7] = np.nan
        optimizer.apply_gradients([(gradient, w.local)])

    for number in range(4):
        strategy.run(lambda number=number: train_replica(number))
        if number < 3:
            norms.append(float(optimizer.global_norm))
    return norms, [copy.numpy().tobytes().hex() for copy in w.replicas]


def save_and_restore(group: Group, folder: Path) -> Any:
    """Rank 0 writes the checkpoint that all restore."""
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    w = strategy.variable(np.zeros(5, np.float32), name="w")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = gpuopt.Saver([w.replicas[0], step], optimizers=[optimizer])

    def train_replica() -> None:
        gradient = np.full(5, group.rank + int(step), np.float32)
        optimizer.apply_gradients([(gradient, w.local)], step)

    def save() -> Any:
        return strategy.call_once(lambda: saver.save(folder / "model", step))

    def bits() -> list[str]:
        arrays = [w.numpy(), optimizer.get_slot(w.replicas[0], "m").numpy(), step.numpy()]
        return [array.tobytes().hex() for array in arrays]

    strategy.run(train_replica)
    [path] = strategy.run(save).values
    for _ in range(2):
        strategy.run(train_replica)
    expected = bits()
    w.assign(np.full(5, group.rank))
    saver.restore(strategy.call_once(lambda: gpuopt.latest_checkpoint(str(folder))))
    for _ in range(2):
        strategy.run(train_replica)
    return path, bits(), expected


def accumulate_gradients(group: Group, folder: Path) -> Any:
    return accumulate(gpuopt.MirroredStrategy(["cpu"], group=group))


PROGRAMS: dict[str, Callable[[Group, Path], Any]] = {
    function.__name__: function
    for function in (
        train_mirrored,
        take_values_of_rank_0,
        make_other_variables,
        bring_other_gradients,
        train_on_uneven_batches,
        fail_alone,
        clip_alike,
        clip_in_the_step,
        save_and_restore,
        accumulate_gradients,
    )
}


def run_programs(
    known: Mapping[str, Callable[[Group, Path], Any]], folder: Path, programs: Sequence[str]
) -> None:
    """Runs programs in this rank, and writes what they return."""
    group = (TorchGroup if "WORLD_SIZE" in os.environ else MPIGroup)(TIMEOUT_S)
    for program in programs:
        outcome = known[program](group, folder)
        (folder / f"{program}.{group.rank}.json").write_text(json.dumps(outcome))
        gc.collect()  # so that the next one's variables can have the same names


if __name__ == "__main__":
    run_programs(PROGRAMS, Path(sys.argv[1]), sys.argv[2:])
