"""Ranks in processes of their own: `run_processes` starts them, and this file is what they run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import driver
import numpy as np
from accumulating_ranks import accumulate, leave_out_in_one, save_in_the_middle
from naive_communicator import ProcessGroup

import gpuopt
from gpuopt.distributed import NCCLGroup, PerReplica, RankGroup
from gpuopt.distributed.communicators.nccl import CHECKED_CALLS

LONG_S = 20.0
SHORT_S = 1.0


def run_processes(
    scenario: str, ranks_of_processes: Sequence[Sequence[int]], kind: str = "cpu"
) -> list[Any]:
    """Runs a scenario of this file; returns what each process printed, or its exit status.

    Args:
        scenario: Its name.
        ranks_of_processes: The ranks of each process.
        kind: "cpu"; or "nccl", where each rank has the GPU of its number.
    """
    sockets: list[dict[str, int]] = [{} for _ in ranks_of_processes]
    ends = []
    for one, other in combinations(range(len(ranks_of_processes)), 2):
        for a in ranks_of_processes[one]:
            for b in ranks_of_processes[other]:
                pair = socket.socketpair()
                ends.extend(pair)
                sockets[one][f"{a},{b}"] = pair[0].fileno()
                sockets[other][f"{b},{a}"] = pair[1].fileno()
    folders = [str(Path(gpuopt.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, scenario, json.dumps(ranks), json.dumps(mine), kind],
            stdout=subprocess.PIPE,
            pass_fds=mine.values(),
            env=environment,
        )
        for ranks, mine in zip(ranks_of_processes, sockets, strict=True)
    ]
    for end in ends:
        end.close()
    try:
        outputs = [process.communicate(timeout=3 * LONG_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        json.loads(output) if process.returncode == 0 else process.returncode
        for process, output in zip(processes, outputs, strict=True)
    ]


def train(strategy: gpuopt.MirroredStrategy, rounds: int = 3) -> dict[str, Any]:
    """Trains on gradients that depend on the rank; returns the bits of all copies and slots."""
    w = strategy.variable(np.linspace(-1, 1, 5, dtype=np.float32), name="w")
    table = strategy.variable(np.ones((6, 2), np.float32), name="table")
    step = gpuopt.Variable(0, name="global_step", trainable=False, dtype=np.int64)
    optimizer = gpuopt.AdamOptimizer(0.1, on_nonfinite="skip")

    def train_replica(number: int, share: int) -> list[int]:
        rank = strategy.communicator.rank
        rng = np.random.default_rng((number, rank))
        gradient = rng.standard_normal(5).astype(np.float32)
        if number == 1 and rank == strategy.num_replicas_in_sync - 1:
            gradient[2] = np.nan  # every process skips this step
        rows = rng.integers(0, 6, rank)  # rank 0 brings none
        values = rng.standard_normal((rank, 2)).astype(np.float32)
        slices = gpuopt.IndexedSlices(values, rows, (6, 2))
        optimizer.apply_gradients([(gradient, w.local), (slices, table.local)], step)
        return [rank, share]

    shares = PerReplica(range(len(strategy.devices)))
    runs = [strategy.run(train_replica, (number, shares)).values for number in range(rounds)]
    with strategy.scope():
        gradients = PerReplica(np.full(5, rank + 1, np.float32) for rank, _ in runs[0])
        optimizer._distributed_apply(strategy, [(gradients, w)], step)
    copies = [*w.replicas, *table.replicas]
    slots = [optimizer.get_slot(copy, "m") for copy in copies]
    return {
        "replicas": runs[0],
        "step": int(step),
        "bits": [variable.numpy().tobytes().hex() for variable in [*copies, *slots]],
    }


def fail_in_one_process(strategy: gpuopt.MirroredStrategy) -> str:
    """One process's update raises; returns what the replicas of this one raised."""
    w = strategy.variable([0.0], name="w")

    class Failing(gpuopt.GradientDescentOptimizer):
        def _prepare(self) -> None:
            if strategy.communicator.rank == 0:
                raise ZeroDivisionError("no rate")
            super()._prepare()

    optimizer = Failing(1.0)

    def train_replica() -> str:
        try:
            optimizer.apply_gradients([(np.ones(1, np.float32), w.local)])
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return ", ".join(sorted(set(strategy.run(train_replica).values)))


def differ_in_one_process(strategy: gpuopt.MirroredStrategy) -> list[str]:
    """The last rank's process differs in one thing at a time; returns what each replica raised."""
    is_last = strategy.run(lambda: strategy.communicator.rank).values[-1] == (
        strategy.num_replicas_in_sync - 1
    )
    checking = gpuopt.MirroredStrategy(strategy.devices, group=strategy._group, check=True)
    ones = np.ones(2, np.float32)
    told = []

    def attempt(
        optimizer: gpuopt.Optimizer, step: Any, w: Any, over: gpuopt.MirroredStrategy = strategy
    ) -> None:
        before = w.numpy().tolist()

        def apply() -> str:
            try:
                optimizer.apply_gradients([(ones, w.local)], step)
            except ValueError as error:
                return str(error)
            return "nothing"

        [error] = set(over.run(apply).values)
        if error != "nothing":
            assert w.numpy().tolist() == before
        told.append(error)

    def new(make: Any = gpuopt.GradientDescentOptimizer, over: Any = strategy, **other: Any) -> Any:
        arguments = {"learning_rate": 0.5, **(other if is_last else {})}
        step = gpuopt.Variable(0, trainable=False, dtype=np.int64)
        return make(**arguments), step, over.variable(ones)

    attempt(*new(learning_rate=0.25))
    attempt(*new(on_nonfinite="skip"))
    attempt(*new(groups=[gpuopt.ParameterGroup("slow", learning_rate=0.1)]))
    optimizer, step, w = new(gpuopt.AdamOptimizer)
    attempt(optimizer, None if is_last else step, w)
    attempt(optimizer, step, w)
    saved = optimizer.state_dict({"w": w.replicas[0]})
    attempt(optimizer, step, w)
    if is_last:
        optimizer.load_state_dict(saved, {"w": w.replicas[0]})
    attempt(optimizer, step, w)
    if is_last:
        step.assign(1)
    attempt(optimizer, step, w)
    # Restored before the first step: the state still waits for its slots.
    optimizer, step, w = new(gpuopt.AdagradOptimizer)
    if is_last:
        waiting = gpuopt.AdagradOptimizer(0.5)
        waiting.apply_gradients([(ones, w.replicas[0])])
        optimizer.load_state_dict(waiting.state_dict({w.name: w.replicas[0]}))
    attempt(optimizer, step, w)
    # Values alone, without any number that tells them apart.
    optimizer, step, w = new()
    if is_last:
        w.assign(2 * ones)
    attempt(optimizer, step, w)
    w.assign(ones)
    attempt(optimizer, step, w)
    optimizer, step, w = new(over=checking)
    attempt(optimizer, step, w, checking)
    if is_last:
        w.assign(2 * ones)
    attempt(optimizer, step, w, checking)
    return told


def lose_a_process(strategy: gpuopt.MirroredStrategy) -> str:
    """The process of the last rank is killed; returns what the others raised."""
    w = strategy.variable([0.0], name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)

    def train_replica() -> None:
        if strategy.communicator.rank == strategy.num_replicas_in_sync - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.apply_gradients([(np.ones(1, np.float32), w.local)])

    try:
        strategy.run(train_replica)
    except gpuopt.WorkerFailedError as error:
        return str(error)
    return "nothing"


def lose_a_gpu(strategy: gpuopt.MirroredStrategy) -> str:
    """The process of the last rank is killed between collectives; returns what the others raised.

    Nobody asks for the ranks, so that only their GPUs wait for each other.
    """

    def train_replica() -> None:
        import cupy

        communicator = strategy.communicator
        with cupy.cuda.Device(communicator.rank):
            array = cupy.ones(3, np.float32)
            for number in range(1000):
                if number == 2 * CHECKED_CALLS and communicator.rank == communicator.size - 1:
                    cupy.cuda.Device().synchronize()
                    os.kill(os.getpid(), signal.SIGKILL)
                array = communicator.all_reduce(array / communicator.size)
                if number > 2 * CHECKED_CALLS:
                    time.sleep(0.01)

    try:
        strategy.run(train_replica)
    except gpuopt.WorkerFailedError as error:
        return str(error)
    return "nothing"


SCENARIOS: dict[str, Callable[[gpuopt.MirroredStrategy], Any]] = {
    function.__name__: function
    for function in (
        *(train, fail_in_one_process, differ_in_one_process, lose_a_process, lose_a_gpu),
        *(accumulate, leave_out_in_one, save_in_the_middle),
    )
}


def main(scenario: str, ranks: list[int], sockets: dict[str, int], kind: str) -> None:
    pairs = {tuple(map(int, pair.split(","))): fd for pair, fd in sockets.items()}
    group: RankGroup = ProcessGroup(ranks, pairs, LONG_S)  # type: ignore[arg-type]
    devices = ["cpu"] * len(ranks)
    if kind == "nccl":
        devices = [f"gpu:{rank}" for rank in ranks]
        group = NCCLGroup(devices, group, SHORT_S if scenario == "lose_a_gpu" else LONG_S)
    strategy = gpuopt.MirroredStrategy(devices, group=group)
    outcome = json.dumps(SCENARIOS[scenario](strategy))
    if driver.is_here():
        reports = driver.take_reports()
        assert not reports, reports
    print(outcome)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])
