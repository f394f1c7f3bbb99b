"""Ranks to which something happens: `python mpi_faults.py FAULT FOLDER [TIMEOUT_S]`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gpuopt
from gpuopt.distributed import Communicator, MPIGroup, StopRequest, SyncReplicasWorker
from gpuopt.wrappers.drop_stale_gradient import DropStaleGradientWorker

LONG_S = 60.0
NUM_STEPS = 12


def is_rank(rank: int) -> bool:
    """Before MPI has started."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == rank


def reduce_for_ever(communicator: Communicator) -> None:
    while True:
        communicator.all_reduce(np.ones(10_000))


def kill_a_rank(folder: Path, timeout_s: float) -> None:
    group = MPIGroup(timeout_s)

    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            communicator.barrier()
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.barrier()
        reduce_for_ever(communicator)

    group.run(run)


def raise_in_a_run(folder: Path, timeout_s: float) -> None:
    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise KeyError("lost")
        reduce_for_ever(communicator)

    MPIGroup(timeout_s).run(run)


def raise_between_runs(folder: Path, timeout_s: float) -> None:
    group = MPIGroup(timeout_s)
    if group.rank == 1:
        raise KeyError("lost")
    group.run(reduce_for_ever)


def raise_while_others_compute(folder: Path, timeout_s: float) -> None:
    group = MPIGroup(timeout_s)
    if group.rank == 1:
        raise KeyError("lost")
    time.sleep(LONG_S)


def exit_in_a_run(folder: Path, timeout_s: float) -> None:
    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            sys.exit(3)
        reduce_for_ever(communicator)

    MPIGroup(timeout_s).run(run)


def exit_in_a_worker(folder: Path, timeout_s: float) -> None:
    """Of a SyncReplicasOptimizer, whose other worker needs it."""
    _train_workers(timeout_s, lambda: sys.exit(3))


def finish_by_an_exit_in_a_worker(folder: Path, timeout_s: float) -> None:
    """The other worker, which needs it, is told that it has finished."""
    _train_workers(timeout_s, sys.exit)


def exit_without_an_error(folder: Path, timeout_s: float) -> None:
    """In one rank alone: it has finished."""
    group = MPIGroup(timeout_s)

    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            sys.exit()
        try:
            communicator.barrier()
        except gpuopt.CancelledError as error:
            (folder / f"told.{communicator.rank}").write_text(str(error))

    group.run(run)


def end_before_the_others(folder: Path, timeout_s: float) -> None:
    """Without an error: the others have something to do that needs no communicator."""
    group = MPIGroup(timeout_s)
    if group.rank != 0:
        time.sleep(timeout_s + 1)
        (folder / f"done.{group.rank}").touch()


def never_start_mpi(folder: Path, timeout_s: float) -> None:
    if is_rank(1):
        time.sleep(LONG_S)
    MPIGroup(timeout_s)


def never_make_the_group(folder: Path, timeout_s: float) -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        time.sleep(LONG_S)
    MPIGroup(timeout_s)


def never_come(folder: Path, timeout_s: float) -> None:
    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            time.sleep(LONG_S)
        communicator.barrier("the meeting")

    MPIGroup(timeout_s).run(run)


def come_late(folder: Path, timeout_s: float) -> None:
    logging.basicConfig()

    def run(communicator: Communicator) -> None:
        if communicator.rank == 1:
            time.sleep(0.7 * timeout_s)
        communicator.barrier("the meeting")

    MPIGroup(timeout_s).run(run)


def bring_another_version(folder: Path, timeout_s: float) -> None:
    from gpuopt.distributed.communicators import mpi

    if is_rank(1):
        mpi.__version__ = "0.0.1"
    try:
        MPIGroup(timeout_s)
    except ValueError as error:
        (folder / f"refused.{int(is_rank(1))}").write_text(str(error))


def train_with_checkpoints(folder: Path, timeout_s: float) -> None:
    """Restores the newest checkpoint, if there is one; saves after each fourth step and at a stop.

    Writes the bits of the result when all steps are done. `kill_at` in the folder is the number of
    the step in which the last rank is killed.
    """
    group = MPIGroup(timeout_s)
    strategy = gpuopt.MirroredStrategy(["cpu"], group=group)
    w = strategy.variable(np.zeros(50, np.float32), name="w")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.AdamOptimizer(0.1)
    saver = gpuopt.Saver([w.replicas[0], step], optimizers=[optimizer])
    newest = strategy.call_once(lambda: gpuopt.latest_checkpoint(str(folder)))
    if newest is not None:
        saver.restore(newest)
    kill_at = folder / "kill_at"
    dies_at = int(kill_at.read_text()) if kill_at.exists() else None
    (folder / f"pid.{group.rank}").write_text(str(os.getpid()))
    (folder / f"began_at.{group.rank}").write_text(str(int(step)))

    def train_step() -> bool:
        if int(step) == dies_at and group.rank == group.size - 1:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        rng = np.random.default_rng((int(step), group.rank))
        optimizer.apply_gradients([(rng.standard_normal(50).astype(np.float32), w.local)], step)
        return request.is_agreed(strategy.communicator)

    with StopRequest() as request:
        while int(step) < NUM_STEPS:
            is_stopped = strategy.run(train_step).values[0]
            if int(step) % 4 == 0 or is_stopped:
                strategy.call_once(lambda: saver.save(folder / "model", step))
            if is_stopped:
                return
            if (folder / "wait").exists() and int(step) >= 5:
                time.sleep(0.05)  # until SIGTERM comes
                step.assign(5)
    (folder / f"result.{group.rank}").write_text(w.numpy().tobytes().hex())


def raise_in_a_worker(folder: Path, timeout_s: float) -> None:
    """Of a SyncReplicasOptimizer, whose other worker needs it."""

    def fail() -> None:
        raise KeyError("lost")

    _train_workers(timeout_s, fail)


def _train_workers(timeout_s: float, fail: Callable[[], None]) -> None:
    """Trains until worker 1, which the other one needs, fails."""

    def train(worker: SyncReplicasWorker) -> None:
        worker.apply_gradients([(np.ones(1, np.float32), w)], step)
        if worker.index == 1:
            fail()
        worker.apply_gradients([(np.ones(1, np.float32), w)], step)

    group = MPIGroup(timeout_s)
    w = gpuopt.Variable([0.0], name="w")
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), group.size - 1)
    sync.run(train, step, token_policy="per_step", timeout_s=timeout_s, group=group)


def kill_a_worker(folder: Path, timeout_s: float) -> None:
    """Of those whose gradients may be stale, and who do not need each other."""

    def train(worker: DropStaleGradientWorker) -> None:
        while True:
            worker.apply_gradients([(np.ones(1, np.float32), w)])
            if worker.index == 1 and worker.local_step > 3:
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    group = MPIGroup(timeout_s)
    w = gpuopt.Variable([0.0], name="w")
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    drop = gpuopt.DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1)
    drop.run(train, step, timeout_s=timeout_s, group=group)


def interrupt_the_chief(folder: Path, timeout_s: float) -> None:
    """Ctrl-C reaches a chief whose workers train."""

    def train(worker: SyncReplicasWorker) -> None:
        while True:
            worker.apply_gradients([(np.ones(1, np.float32), w)], step)
            if worker.index == 1 and worker.local_step == 3:
                os.kill(chief, signal.SIGINT)

    group = MPIGroup(timeout_s)
    [[chief, *_]] = group.run(lambda communicator: communicator.all_gather(os.getpid()))
    w = gpuopt.Variable([0.0], name="w")
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), group.size - 1)
    sync.run(train, step, 0, timeout_s=timeout_s, group=group)


def freeze_the_chief(folder: Path, timeout_s: float) -> None:
    """The chief is suspended while one worker waits for a token, and one for the end."""

    def train(worker: SyncReplicasWorker) -> None:
        worker.apply_gradients([(np.ones(1, np.float32), w)], step)
        if worker.index == 1:
            os.kill(chief, signal.SIGSTOP)
            worker.apply_gradients([(np.ones(1, np.float32), w)], step)

    group = MPIGroup(timeout_s)
    [[chief, *_]] = group.run(lambda communicator: communicator.all_gather(os.getpid()))
    w = gpuopt.Variable([0.0], name="w")
    step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
    sync = gpuopt.SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1, group.size - 1)
    sync.run(train, step, 0, timeout_s=timeout_s / 4, group=group)


def train_workers_with_checkpoints(folder: Path, timeout_s: float) -> None:
    """Does what `train_with_checkpoints` does, with a chief and two workers.

    The chief alone restores and saves. Two gradients have the same sum in any order.
    """
    group = MPIGroup(timeout_s)
    w = gpuopt.Variable(np.zeros(50, np.float32), name="w")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.AdamOptimizer(0.1)
    sync = gpuopt.SyncReplicasOptimizer(optimizer, group.size - 1)
    saver = gpuopt.Saver([w, step], optimizers=[optimizer])
    newest = gpuopt.latest_checkpoint(str(folder))
    if group.rank == 0 and newest is not None:
        saver.restore(newest)
    kill_at = folder / "kill_at"
    dies_at = int(kill_at.read_text()) if kill_at.exists() else None
    began_at = [] if group.rank else [int(step)]

    def train(worker: SyncReplicasWorker) -> None:
        began_at.append(worker.local_step)
        target = worker.local_step + 4
        while worker.local_step < target:
            if worker.local_step == dies_at and group.rank == group.size - 1:
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            rng = np.random.default_rng((worker.local_step, worker.index))
            worker.apply_gradients([(rng.standard_normal(50).astype(np.float32), w)], step)
            if (folder / "wait").exists() and worker.local_step >= 5:
                (folder / f"pid.{group.rank}").write_text(str(os.getpid()))
                target += 1  # until SIGTERM comes
                time.sleep(0.05)

    with StopRequest() as request:
        while True:
            ended = sync.run(
                train,
                step,
                token_policy="per_step",
                timeout_s=timeout_s,
                group=group,
                stop=request,
            )
            if group.rank == 0:
                saver.save(folder / "model", step)
            if ended.was_stopped:
                return
            if int(step) >= NUM_STEPS:
                break
    (folder / f"began_at.{group.rank}").write_text(str(began_at[0]))
    (folder / f"result.{group.rank}").write_text(w.numpy().tobytes().hex())


FAULTS: dict[str, Callable[[Path, float], None]] = {
    function.__name__: function
    for function in (
        kill_a_rank,
        raise_in_a_run,
        raise_between_runs,
        raise_while_others_compute,
        exit_in_a_run,
        exit_in_a_worker,
        finish_by_an_exit_in_a_worker,
        exit_without_an_error,
        end_before_the_others,
        never_start_mpi,
        never_make_the_group,
        never_come,
        come_late,
        bring_another_version,
        train_with_checkpoints,
        raise_in_a_worker,
        kill_a_worker,
        interrupt_the_chief,
        freeze_the_chief,
        train_workers_with_checkpoints,
    )
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]](Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else LONG_S)
