"""Workers that drop stale gradients: `python mpi_stale_programs.py FOLDER PROGRAM...`.

Programs are as in mpi_programs.py; each runs with any number of ranks, of which rank 0 is the
chief.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from mpi_programs import TIMEOUT_S, run_programs
from mpi_sync_programs import ListeningGroup, attempt, figures_of
from stale_training import Training, new_order
from sync_training import new_step

import gpuopt
from gpuopt import DropStaleGradientOptimizer, IndexedSlices, Variable
from gpuopt.distributed import Coordinator, MPIGroup, StopRequest
from gpuopt.distributed.communicator import RankGroup
from gpuopt.wrappers.drop_stale_gradient import DropStaleGradientWorker

SEEDS = range(4)
Train = Callable[[DropStaleGradientWorker], Any]


def train_in_given_orders(group: MPIGroup, folder: Path) -> Any:
    """The chief takes the workers' gradients in the orders that the tests replay."""
    outcomes = []
    for seed in SEEDS:
        training = Training(staleness=seed % 3, start=float(group.rank))
        order = [worker + 1 for worker in new_order(group.size - 1, seed)]
        ended = training.optimizer.run(
            lambda worker, t=training: t.train(worker, lambda _: nullcontext(), lambda: None),
            training.step,
            timeout_s=TIMEOUT_S,
            group=ListeningGroup(group, order, lambda rank: None),
        )
        outcomes.append(training.outcome(ended.figures()))
        del training, ended
        gc.collect()  # so that the next one's variables can have the same names
    return outcomes


def train_freely(group: MPIGroup, folder: Path) -> Any:
    """The chief takes gradients as they come, and notes their order."""
    training = Training(1)
    order: list[int] = []
    counts = [0] * group.size

    def heard(rank: int | None) -> None:
        coordinator = training.optimizer._coordinator
        assert coordinator is not None
        for worker, figures in enumerate(coordinator.figures()):
            count = figures.accepted + figures.stale
            order.extend([worker] * (count - counts[worker]))
            counts[worker] = count

    ended = training.optimizer.run(
        lambda worker: training.train(worker, lambda _: nullcontext(), lambda: None),
        training.step,
        timeout_s=TIMEOUT_S,
        group=ListeningGroup(group, None, heard),
    )
    return order, training.outcome(ended.figures())


def run(
    group: RankGroup,
    train: Train,
    step: Variable,
    staleness: int = 100,
    optimizer: gpuopt.Optimizer | None = None,
    **options: Any,
) -> Coordinator:
    drop = DropStaleGradientOptimizer(optimizer or gpuopt.GradientDescentOptimizer(1.0), staleness)
    return drop.run(train, step, **{"timeout_s": TIMEOUT_S, "group": group, **options})


def make_training() -> tuple[Variable, Variable]:
    return Variable(np.zeros(2, np.float32), name="w"), new_step()


def ones(w: Variable) -> list[Any]:
    return [(np.ones(2, np.float32), w)]


def minimize_by_either(group: MPIGroup, folder: Path) -> Any:
    """In a worker's function, the optimizer does what the worker does."""
    w, step = make_training()
    optimizer = DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(1.0), 100)
    seen = []

    def train(worker: DropStaleGradientWorker) -> None:
        for each in (worker, optimizer):
            each.minimize(lambda: -w.sum(), step, [w])
            # Its own gradient is there; others' may be.
            seen.append(bool((w.numpy() == int(step)).all()) and worker.local_step == int(step))
        optimizer.apply_gradients(ones(w), local_step=-1000)
        pairs = optimizer.compute_gradients(lambda: -w.sum(), [w])
        assert worker.local_step == int(step)
        optimizer.apply_gradients(pairs)

    ended = optimizer.run(train, step, group=group, timeout_s=TIMEOUT_S)
    counts = float(optimizer.stale_counter), figures_of(ended)
    return seen, counts, int(step), w.numpy().tolist()


def bring_other_things(group: MPIGroup, folder: Path) -> Any:
    """Ranks whose arguments differ, and groups of another size, or of threads."""
    other = group.rank == 2
    w, step = make_training()
    errors = []

    def train(worker: DropStaleGradientWorker) -> None:
        worker.apply_gradients(ones(w))

    errors.append(attempt(lambda: run(group, train, step, 1 + other)))
    errors.append(attempt(lambda: run(group, train, step, timeout_s=TIMEOUT_S + other)))
    v = Variable(np.zeros(2, np.float32), name="v" if other else "u")
    errors.append(attempt(lambda: run(group, train, step)))
    v.trainable = False
    errors.append(attempt(lambda: run(group, train, step, num_workers=5)))
    # Whatever the counters are called.
    also = DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(1.0), 1) if other else None
    errors.append(attempt(lambda: run(group, train, step)))
    del also
    return errors


def push_other_things(group: MPIGroup, folder: Path) -> Any:
    """Pushes that are refused, after which the worker goes on."""
    w, step = make_training()
    table = Variable(np.zeros((3, 2), np.float32), name="table")
    late = Variable(np.zeros(2, np.float32), name="late", trainable=False)
    optimizer = DropStaleGradientOptimizer(gpuopt.GradientDescentOptimizer(1.0), 100)
    errors: list[str] = []
    told = folder / f"child.{group.rank}"

    def train(worker: DropStaleGradientWorker) -> None:
        gradient = ones(w)[0][0]
        outside = IndexedSlices(np.ones((1, 2), np.float32), [3])
        for pairs in (
            [(gradient, late)],
            [],
            [(None, w)],
            [(np.ones(3, np.float32), w)],
            [(gradient.astype(np.int32), w)],
            [(outside, table)],
        ):
            errors.append(attempt(lambda p=pairs: worker.apply_gradients(p, step)))
        errors.append(attempt(lambda: worker.apply_gradients(ones(w), new_step())))
        wrapper = gpuopt.MovingAverageOptimizer(worker)
        errors.append(attempt(lambda: wrapper.apply_gradients(ones(w), step)))

        def in_thread() -> None:
            errors.append(attempt(lambda: worker.apply_gradients(ones(w), step)))
            errors.append(attempt(lambda: optimizer.apply_gradients(ones(w), step, local_step=0)))

        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()
        errors.append(attempt(lambda: optimizer.run(train, step, 1)))
        child = os.fork()
        if not child:
            told.write_text(attempt(lambda: worker.apply_gradients(ones(w))))
            os._exit(0)
        os.waitpid(child, 0)
        worker.apply_gradients(ones(w))

    ended = optimizer.run(train, step, group=group, timeout_s=TIMEOUT_S)
    child_told = told.read_text() if group.rank else ""
    return errors, child_told, figures_of(ended), int(step), w.numpy().tolist()


def skip_steps(group: MPIGroup, folder: Path) -> Any:
    """A NaN makes no step, and its worker goes on; the others' gradients are applied."""
    w, step = make_training()
    optimizer = gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="skip")

    def train(worker: DropStaleGradientWorker) -> None:
        for number in range(3):
            value = np.nan if worker.index == 1 and number == 1 else 1
            worker.apply_gradients([(np.full(2, value, np.float32), w)], step)

    ended = run(group, train, step, optimizer=optimizer)
    return figures_of(ended), int(step), w.numpy().tolist()


def be_late(group: MPIGroup, folder: Path) -> Any:
    """The last worker's gradient comes when the others have done; its next one is in time."""
    w, step = make_training()
    done = [folder / f"done.{worker}" for worker in range(group.size - 2)]
    errors: list[str] = []

    def train(worker: DropStaleGradientWorker) -> None:
        if worker.index < len(done):
            for _ in range(3):
                worker.apply_gradients(ones(w), step)
            done[worker.index].touch()
            return
        while not all(each.exists() for each in done):
            time.sleep(0.01)
        steps = 3 * len(done)
        worker.apply_gradients([(np.full(2, 100, np.float32), w)], step)
        assert (worker.local_step, w.numpy().tolist()) == (steps, [-steps] * 2)
        worker.apply_gradients(ones(w), step)
        errors.append(attempt(lambda: worker.apply_gradients(ones(late), step)))

    late = Variable(np.zeros(2, np.float32), name="late", trainable=False)
    ended = run(group, train, step, 2 * len(done))
    return figures_of(ended), w.numpy().tolist()


def fail_in_a_worker(group: MPIGroup, folder: Path) -> Any:
    """The others go on without worker 1; if it is the last one, all raise."""
    w, step = make_training()
    gone = folder / "gone"

    def train(worker: DropStaleGradientWorker) -> None:
        worker.apply_gradients(ones(w))
        if worker.index == 1:
            gone.touch()
            raise KeyError("lost")
        while not gone.exists():
            time.sleep(0.01)
        worker.apply_gradients(ones(w))

    def fail(worker: DropStaleGradientWorker) -> None:
        raise KeyError("all of them")

    first = attempt(lambda: run(group, train, step)), int(step), w.numpy().tolist()
    return first, attempt(lambda: run(group, fail, step)).replace(f"worker {group.rank - 1}", "")


def fail_when_the_others_have_finished(group: MPIGroup, folder: Path) -> Any:
    """As before: it is no matter of time whether a failure counts."""
    w, step = make_training()
    seen: list[int] = []

    def heard(rank: int | None) -> None:
        if rank is not None:
            seen.append(rank)

    def train(worker: DropStaleGradientWorker) -> None:
        if worker.index == 0:
            raise KeyError("lost")
        worker.apply_gradients(ones(w))

    # Each of the others pushes and leaves before the chief listens to worker 0.
    order = [rank for rank in range(2, group.size) for _ in range(2)]
    run(ListeningGroup(group, [*order, 1], heard), train, step)
    return seen[: len(order) + 1], int(step), w.numpy().tolist()


def fail_in_the_update(group: MPIGroup, folder: Path) -> Any:
    w, step = make_training()

    class Failing(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            raise ZeroDivisionError("no rate")

    def train(worker: DropStaleGradientWorker) -> None:
        worker.apply_gradients(ones(w))

    return attempt(lambda: run(group, train, step, optimizer=Failing(1.0)))


def stop_by_a_worker(group: MPIGroup, folder: Path) -> Any:
    """A request of the last worker's ends the training of all."""
    w, step = make_training()
    stop = StopRequest()

    def train(worker: DropStaleGradientWorker) -> None:
        for number in range(1_000_000):
            stop.has_come = worker.index == group.size - 2 and number == 3
            worker.apply_gradients(ones(w))

    ended = run(group, train, step, stop=stop)
    return ended.was_stopped, int(step) >= 3, w.numpy().tolist() == [-int(step)] * 2


def train_again(group: MPIGroup, folder: Path) -> Any:
    """A second run goes on from the first; the chief saves between them, and restores."""
    w, step = make_training()
    optimizer = DropStaleGradientOptimizer(gpuopt.MomentumOptimizer(1.0, 0.5), 0)
    saver = gpuopt.Saver([w, step, optimizer.stale_counter], optimizers=[optimizer])

    def train(worker: DropStaleGradientWorker) -> None:
        if worker.index == 0:
            for _ in range(3):
                worker.apply_gradients(ones(w))

    def run_once() -> list[Any]:
        optimizer.run(train, step, group=group, timeout_s=TIMEOUT_S)
        return [int(step), float(optimizer.stale_counter), w.numpy().tolist()]

    outcomes = [run_once()]
    if group.rank == 0:
        optimizer.stale_counter.assign(7)
        path = saver.save(folder / "model", step)
    outcomes.append(run_once())
    if group.rank == 0:
        saver.restore(path)
    return [*outcomes, run_once()]


PROGRAMS: dict[str, Callable[[MPIGroup, Path], Any]] = {
    function.__name__: function
    for function in (
        train_in_given_orders,
        train_freely,
        minimize_by_either,
        bring_other_things,
        push_other_things,
        skip_steps,
        be_late,
        fail_in_a_worker,
        fail_when_the_others_have_finished,
        fail_in_the_update,
        stop_by_a_worker,
        train_again,
    )
}

if __name__ == "__main__":
    run_programs(PROGRAMS, Path(sys.argv[1]), sys.argv[2:])
