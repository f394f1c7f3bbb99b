"""A chief and its workers in tests: `python mpi_sync_programs.py FOLDER PROGRAM...`.

Programs are as in mpi_programs.py; each runs with any number of ranks, of which rank 0 is the
chief.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from mpi_programs import TIMEOUT_S, run_programs
from sync_golden import CASES, Replay
from sync_training import Problem, new_step

import gpuopt
from gpuopt import IndexedSlices, SyncReplicasOptimizer, Variable
from gpuopt.distributed import Coordinator, MPIGroup, StopRequest, SyncReplicasWorker
from gpuopt.distributed.communicator import Communicator, MessagingCommunicator, RankGroup

SHORT_S = 0.4
NUM_STEPS = 20
Train = Callable[[SyncReplicasWorker], Any]


class Listening(MessagingCommunicator):
    """A communicator whose owner is watched, and may have to listen to one rank after the other."""

    def __init__(
        self,
        communicator: MessagingCommunicator,
        order: Iterable[int] | None,
        heard: Callable[[int | None], None],
    ) -> None:
        """Wraps a communicator.

        Args:
            communicator: That of rank 0.
            order: The ranks to listen to, each for one message; then to all. By default to all.
            heard: Called when the next message is asked for, with the rank of the last one, or
                None before the first one.
        """
        self.rank, self.size = communicator.rank, communicator.size
        self._inner = communicator
        self._order = None if order is None else list(order)
        self._heard = heard
        self._has_news, self._last = True, None

    @property
    def local(self) -> Communicator:
        return self._inner.local

    def all_gather(self, value: Any, what: str = "all_gather") -> list[Any]:
        return self._inner.all_gather(value, what)

    def send(self, value: Any, rank: int) -> None:
        self._inner.send(value, rank)

    def receive(self, ranks: Iterable[int], timeout_s: float) -> tuple[int, Any] | None:
        if self._has_news:
            self._heard(self._last)
            self._has_news = False
        received = self._inner.receive([self._order[0]] if self._order else ranks, timeout_s)
        if received is not None:
            if self._order:
                self._order.pop(0)
            self._last, self._has_news = received[0], True
        return received


class ListeningGroup:
    """A group whose rank 0 has a `Listening` communicator."""

    local_size = 1

    def __init__(self, group: MPIGroup, *listening: Any) -> None:
        self.size = group.size
        self._group, self._listening = group, listening

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        def run_rank(communicator: MessagingCommunicator) -> Any:
            if communicator.rank == 0:
                communicator = Listening(communicator, *self._listening)
            return function(communicator)

        return self._group.run(run_rank)


def figures_of(coordinator: Coordinator) -> list[list[int]]:
    return [[figures.accepted, figures.stale] for figures in coordinator.figures()]


def attempt(function: Callable[[], Any]) -> str:
    """Returns what a call raises, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# Messages.


def send_messages(group: MPIGroup, folder: Path) -> Any:
    """Every rank but the first sends it messages; those of the first and last one are awaited."""
    sizes = [0, 7, 100_000, 1, 3_000_000, 1_000]  # with and without a block of its own

    def message(rank: int, number: int) -> Any:
        return number, np.full(sizes[number], rank * 10 + number, np.uint8), "text"

    def talk(communicator: MessagingCommunicator) -> Any:
        last = communicator.size - 1
        if communicator.rank > 0:
            for number in range(len(sizes)):
                communicator.send(message(communicator.rank, number), 0)
            return communicator.receive(iter([0]), TIMEOUT_S)  # any iterable
        right = communicator.receive([], 0.01) is None  # nobody is awaited
        got: dict[int, int] = {1: 0, last: 0}
        while sum(got.values()) < len(sizes) * len(got):
            received = communicator.receive(got, TIMEOUT_S)
            assert received is not None
            rank, (number, array, text) = received
            expected = message(rank, got[rank])
            right &= (number, text) == (expected[0], expected[2])
            right &= bool(np.array_equal(array, expected[1]))
            got[rank] += 1
        right &= communicator.receive(got, 0.01) is None
        for rank in range(1, communicator.size):
            communicator.send("done", rank)
        ends = [communicator.receive([rank], TIMEOUT_S) for rank in (1, last, 1)]
        wrong = [attempt(lambda r=rank: communicator.send(1, r)) for rank in (0, -1, last + 1)]
        return right, [f"{type(end[1]).__name__}: {end[1]}" for end in ends if end], wrong

    def fail(communicator: MessagingCommunicator) -> Any:
        if communicator.rank == 1:
            raise KeyError("lost")
        received = communicator.receive([1], TIMEOUT_S)
        return None if received is None else [received[0], str(received[1])]

    def call(communicator: MessagingCommunicator) -> Any:
        if communicator.rank > 0:
            return attempt(communicator.barrier)
        return attempt(lambda: communicator.receive([1], TIMEOUT_S))

    outcome = [group.run(talk)[0]]
    try:
        outcome += group.run(fail)
    except KeyError:
        outcome.append("raised")
    return outcome + group.run(call)


# What TensorFlow did.


def replay_golden(group: MPIGroup, folder: Path) -> Any:
    """Replays TensorFlow's logs: the chief takes the workers' pushes in their order."""
    outcomes = {}
    for case in CASES:
        if case["total_num_replicas"] == group.size - 1:
            outcomes[case["tag"]] = replay_case(group, Replay(case))
            gc.collect()  # so that the next one's variables can have the same names
    return outcomes


def replay_case(group: MPIGroup, replay: Replay) -> Any:
    case, sync = replay.case, replay.sync
    events = case["events"]
    pushes = [
        (position, worker)
        for position, event in enumerate(events)
        for worker in event.get("workers", [])
    ]
    snapshots: list[Any] = []
    stop = StopRequest()

    def heard(rank: int | None) -> None:
        coordinator = sync._coordinator
        assert coordinator is not None
        if rank is not None and pushes:
            assert pushes.pop(0)[1] == rank - 1
        if not pushes or pushes[0][0] == len(snapshots) + 1:
            blocked = sorted({ticket.worker for ticket in coordinator._queue.waiting})
            snapshots.append([replay.snapshot(coordinator), blocked])
        stop.has_come = not pushes

    local_steps: list[int] = []

    def train(worker: SyncReplicasWorker) -> None:
        coordinator = worker._coordinator
        waiting = []
        for position, event in enumerate(events):
            if worker.index in event.get("workers", []):
                pairs = replay.pairs(position, worker.index)
                # One that waits may push again, as TensorFlow's sessions can.
                waiting.append(coordinator.push(worker.index, worker.local_step, pairs))
            if worker.index not in event.get("blocked_after", []):
                for ticket in waiting:
                    worker.local_step = coordinator.wait(ticket)
                waiting.clear()
            local_steps.append(worker.local_step)

    coordinator = sync.run(
        train,
        replay.step,
        case["init_num_tokens_arg"],
        timeout_s=TIMEOUT_S,
        group=ListeningGroup(group, [worker + 1 for _, worker in pushes], heard),
        stop=stop,
    )
    return {
        "snapshots": snapshots,
        "local_steps": local_steps,
        "figures": figures_of(coordinator),
        "was_stopped": coordinator.was_stopped,
    }


# What any order of events comes to.


def train_freely(group: MPIGroup, folder: Path) -> Any:
    """Trains in whatever order gradients come; returns the chief's log, and all ranks' bits."""
    total = group.size - 1
    settings: list[Any] = [
        (aggregate, policy) for aggregate in {total, total - 1, 1} for policy in ("tf", "per_step")
    ]
    outcomes = []
    for aggregate, policy in [*settings, (2 * total, "tf")]:
        outcomes.append([aggregate, policy, *train_until_done(group, aggregate, policy)])
        gc.collect()  # so that the next one's variables can have the same names
    return outcomes


def train_until_done(group: MPIGroup, aggregate: int, policy: Any) -> list[Any]:
    """Returns the steps, the figures, and the bits of the weights."""
    total = group.size - 1
    problem, step = Problem(), new_step()
    sync = SyncReplicasOptimizer(problem.optimizer, aggregate, total)
    log: list[list[int]] = []  # the workers whose gradients were accepted for each step
    accepted = [0] * total

    def heard(rank: int | None) -> None:
        coordinator = sync._coordinator
        assert coordinator is not None
        for worker, figures in enumerate(coordinator.figures()):
            if figures.accepted > accepted[worker]:
                if not log or len(log[-1]) == aggregate:
                    log.append([])
                log[-1].append(worker)
                accepted[worker] = figures.accepted

    def train(worker: SyncReplicasWorker) -> None:
        while int(step) < NUM_STEPS:
            pairs = problem.pairs(worker.index, worker.local_step, problem.read())
            worker.apply_gradients(pairs, step)

    listening = ListeningGroup(group, None, heard)
    coordinator = sync.run(train, step, token_policy=policy, timeout_s=TIMEOUT_S, group=listening)
    if group.rank == 0:
        problem.assert_is_replayed_by(log[: int(step)])
    bits = [array.tobytes().hex() for array in problem.read()]
    return [int(step), figures_of(coordinator), bits]


# How workers of other processes differ from threads, or do not.


def make_training(**options: Any) -> tuple[Variable, Variable]:
    return Variable(np.zeros(2, np.float32), name="w", **options), new_step()


def run(
    group: RankGroup,
    train: Train,
    step: Variable,
    aggregate: int | None = None,
    optimizer: gpuopt.Optimizer | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Coordinator:
    """Runs as many workers as there are ranks, with as many gradients for a step."""
    total = group.size - 1
    sync = SyncReplicasOptimizer(
        optimizer or gpuopt.GradientDescentOptimizer(1.0), aggregate or total, total
    )
    options = {"token_policy": "per_step", "timeout_s": timeout_s, "group": group, **options}
    return sync.run(train, step, **options)


def pushing(w: Variable, step: Variable, steps: int = 3) -> Train:
    def train(worker: SyncReplicasWorker) -> None:
        while worker.local_step < steps:
            worker.apply_gradients([(np.ones(2, np.float32), w)], step)

    return train


def begin_with_the_chiefs_values(group: MPIGroup, folder: Path) -> Any:
    """Every type; the chief's values, moments and averages; a variable without a gradient."""
    rank = group.rank
    w = Variable(np.full(3, rank + 1, np.float32), name="w")
    half = Variable(np.full((800, 3), rank, np.float16), name="half")
    brain = Variable(np.full((4, 3), rank), name="brain", dtype="bfloat16")
    idle = Variable(np.full(2, 7.0 + rank), name="idle")
    kept = Variable(np.full(2, rank, np.float32), name="kept", trainable=False)
    step = new_step()
    step.assign(5 * (rank + 1))
    averages = gpuopt.ExponentialMovingAverage(0.5)
    optimizer = gpuopt.AdamOptimizer(0.1)
    total = group.size - 1
    sync = SyncReplicasOptimizer(optimizer, total, total, averages)
    seen: list[Any] = []

    def train(worker: SyncReplicasWorker) -> None:
        seen.extend([worker.local_step, int(step), w.numpy().tolist(), idle.numpy().tolist()])
        rows = IndexedSlices(np.ones((1, 3), brain.dtype), [worker.index], brain.shape)
        # The one of this thread's worker.
        sync.apply_gradients(
            [(w.numpy(), w), (np.ones_like(half.numpy()), half), (rows, brain), (None, idle)], step
        )
        seen.append(worker.local_step)

    sync.run(train, step, token_policy="per_step", timeout_s=TIMEOUT_S, group=group)
    variables = w, half, brain, idle
    return {
        "seen": seen,
        "step": int(step),
        "kept": kept.numpy().tolist(),
        "bits": [variable.numpy().tobytes().hex() for variable in variables],
        "slots": sorted(variable.name for variable in optimizer.variables()),
        "has_average": averages.average(w) is not None,
    }


def bring_other_things(group: MPIGroup, folder: Path) -> Any:
    """Ranks whose variables or arguments differ, and a group of another size."""
    other = group.rank == 2
    step = new_step()
    errors = []
    w = Variable(np.zeros(3 if other else 2, np.float32), name="w")
    errors.append(attempt(lambda: run(group, pushing(w, step), step)))
    w.trainable = False
    v = Variable(np.zeros(2, np.float32), name="v" if other else "u")
    errors.append(attempt(lambda: run(group, pushing(v, step), step)))
    v.trainable = False
    small = Variable(0, name="small", trainable=False, dtype=np.int32 if other else np.int64)
    errors.append(attempt(lambda: run(group, pushing(v, small), small)))
    policy = "tf" if other else "per_step"
    errors.append(attempt(lambda: run(group, pushing(v, step), step, token_policy=policy)))
    errors.append(attempt(lambda: run(group, pushing(v, step), step, 1 + other)))
    sync = SyncReplicasOptimizer(gpuopt.GradientDescentOptimizer(1.0), 5)
    errors.append(attempt(lambda: sync.run(pushing(v, step), step, group=group)))
    return errors


def push_other_things(group: MPIGroup, folder: Path) -> Any:
    """Pushes that are refused, after which the worker goes on."""
    w, step = make_training()
    late = Variable(np.zeros(2, np.float32), name="late", trainable=False)
    errors: list[str] = []

    def train(worker: SyncReplicasWorker) -> None:
        right = [(np.ones(2, np.float32), w)]
        worker.apply_gradients(right, step)
        rows = IndexedSlices(np.ones(1, np.float32), [0], w.shape)
        for pairs in ([(rows, w)], [(right[0][0], late)], [], [(np.ones(3, np.float32), w)]):
            errors.append(attempt(lambda p=pairs: worker.apply_gradients(p, step)))
        errors.append(attempt(lambda: worker.apply_gradients(right)))
        errors.append(attempt(lambda: worker.apply_gradients(right, late)))
        wrapper = gpuopt.MovingAverageOptimizer(worker)
        errors.append(attempt(lambda: wrapper.apply_gradients(right, step)))
        in_thread = threading.Thread(
            target=lambda: errors.append(attempt(lambda: worker.apply_gradients(right, step)))
        )
        in_thread.start()
        in_thread.join()
        worker.apply_gradients(right, step)

    figures = figures_of(run(group, train, step))
    return errors, figures, int(step), w.numpy().tolist()


def push_from_a_forked_child(group: MPIGroup, folder: Path) -> Any:
    w, step = make_training()
    told = folder / f"child.{group.rank}"

    def train(worker: SyncReplicasWorker) -> None:
        child = os.fork()
        if not child:
            told.write_text(attempt(lambda: pushing(w, step)(worker)))
            os._exit(0)
        os.waitpid(child, 0)
        pushing(w, step)(worker)

    run(group, train, step)
    return [told.read_text() if group.rank else "", w.numpy().tolist()]


def skip_steps(group: MPIGroup, folder: Path) -> Any:
    """A NaN in one worker's gradient has the step skipped, and gathered for again."""
    w, step = make_training()
    optimizer = gpuopt.GradientDescentOptimizer(1.0, on_nonfinite="skip")
    local_steps: list[int] = []

    def train(worker: SyncReplicasWorker) -> None:
        for number in range(3):
            gradient = np.full(2, np.nan if number == worker.index else 1, np.float32)
            worker.apply_gradients([(gradient, w)], step)
            local_steps.append(worker.local_step)

    coordinator = run(group, train, step, optimizer=optimizer)
    return local_steps, figures_of(coordinator), int(step), w.numpy().tolist()


# Failures and deadlines.


def fail_in_a_worker(group: MPIGroup, folder: Path) -> Any:
    """Worker 1 raises in its second step; with 3 workers or more, the others do without it."""
    w, step = make_training()

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == 1:
            pushing(w, step, 1)(worker)
            raise KeyError("lost")
        pushing(w, step, 4)(worker)

    aggregate = max(2, group.size - 2)
    # The chief hears of the failure in the second step: if it came after the last one, the others
    # would have left, and could not do without worker 1.
    listening = ListeningGroup(group, [2, 1, 2], lambda rank: None)
    return attempt(lambda: run(listening, train, step, aggregate)), int(step), w.numpy().tolist()


def fail_in_the_update(group: MPIGroup, folder: Path) -> Any:
    w, step = make_training()

    class Failing(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            raise ZeroDivisionError("no rate")

    return attempt(lambda: run(group, pushing(w, step), step, optimizer=Failing(1.0)))


def never_push(group: MPIGroup, folder: Path) -> Any:
    """Worker 1 does not come in time; the others' gradients stay."""
    w, step = make_training()
    errors: list[str] = []

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == 1:
            time.sleep(3 * SHORT_S)
        else:
            errors.append(attempt(lambda: pushing(w, step, 1)(worker)))

    coordinator = run(group, train, step, timeout_s=SHORT_S)
    has_waited = [figures.waited_s >= SHORT_S for figures in coordinator.figures()]
    return errors, has_waited, int(step)


def leave_a_worker_behind(group: MPIGroup, folder: Path) -> Any:
    """The last worker does not end in time; it comes back for the next run."""
    w, step = make_training()
    errors: list[str] = []

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index == group.size - 2:
            time.sleep(4 * SHORT_S)
            errors.append(attempt(lambda: pushing(w, step)(worker)))
        else:
            pushing(w, step)(worker)

    first = run(group, train, step, group.size - 2, timeout_s=SHORT_S)
    values = w.numpy().tolist()
    last = run(group, pushing(w, step, 5), step)
    return errors, figures_of(first), values, figures_of(last), int(step), w.numpy().tolist()


def leave_while_waiting(group: MPIGroup, folder: Path) -> Any:
    """Worker 1 leaves with a push that is not answered; worker 0 does a second step alone."""
    w, step = make_training()

    def train(worker: SyncReplicasWorker) -> None:
        pairs = [(np.ones(2, np.float32), w)]
        if worker.index == 1:
            worker._coordinator.push(worker.index, worker.local_step, pairs)
        if worker.index == 0:
            for _ in range(3):
                worker.apply_gradients(pairs, step)

    # The chief hears of both before it listens to worker 0.
    listening = ListeningGroup(group, [2, 2], lambda rank: None)
    run(listening, train, step, 2, token_policy="tf", num_tokens=0)
    return int(step)


def be_a_straggler(group: MPIGroup, folder: Path) -> Any:
    """The last worker's first gradient comes when three steps are over, and is dropped."""
    w, step = make_training()
    done = folder / "steps_are_done"

    def train(worker: SyncReplicasWorker) -> None:
        if worker.index < group.size - 2:
            pushing(w, step)(worker)
            done.touch()
            return
        while not done.exists():
            time.sleep(0.01)
        worker.apply_gradients([(np.full(2, 100, np.float32), w)], step)
        assert worker.local_step == 3

    coordinator = run(group, train, step, group.size - 2)
    return figures_of(coordinator), w.numpy().tolist()


def stop_by_a_worker(group: MPIGroup, folder: Path) -> Any:
    """A request of the last worker's ends the training of all."""
    w, step = make_training()
    stop = StopRequest()

    def train(worker: SyncReplicasWorker) -> None:
        while True:
            stop.has_come = worker.index == group.size - 2 and worker.local_step == 3
            worker.apply_gradients([(np.ones(2, np.float32), w)], step)

    coordinator = run(group, train, step, stop=stop)
    return coordinator.was_stopped, int(step) >= 3, w.numpy().tolist() == [-int(step)] * 2


PROGRAMS: dict[str, Callable[[MPIGroup, Path], Any]] = {
    function.__name__: function
    for function in (
        send_messages,
        replay_golden,
        train_freely,
        begin_with_the_chiefs_values,
        bring_other_things,
        push_other_things,
        push_from_a_forked_child,
        skip_steps,
        fail_in_a_worker,
        fail_in_the_update,
        never_push,
        leave_a_worker_behind,
        leave_while_waiting,
        be_a_straggler,
        stop_by_a_worker,
    )
}

if __name__ == "__main__":
    run_programs(PROGRAMS, Path(sys.argv[1]), sys.argv[2:])
