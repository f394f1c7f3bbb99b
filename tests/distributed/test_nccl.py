"""Ranks over NCCL: nobody waits for a GPU, and what is not done in time is told and not read."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import driver
import numpy as np
import pytest
from gpu_streams import new_stream, uploaded, wait_for_gpus
from guide_scripts import scripts_under
from interrupt_at import Interrupt, InterruptAt
from rank_process import train

import gpuopt
from gpuopt import CancelledError, DeadlineExceededError, IndexedSlices, WorkerFailedError
from gpuopt.distributed import (
    Communicator,
    MirroredStrategy,
    NCCLGroup,
    SingleCommunicator,
    SingleGroup,
    ThreadGroup,
)
from gpuopt.distributed.communicators import nccl, nccl_library, nccl_link
from gpuopt.distributed.communicators.host import Host
from gpuopt.distributed.communicators.nccl import CHECKED_CALLS

pytestmark = pytest.mark.gpu

SHORT_S = 0.3
LONG_S = 20.0


@pytest.fixture(autouse=True)
def reads_are_allowed_again() -> Any:
    yield
    for backend in gpuopt.backends.gpu_backends:
        backend.refuse_reads(None)


def group_of(size: int = 2, timeout_s: float = LONG_S, **options: Any) -> NCCLGroup:
    return NCCLGroup(devices(size), timeout_s=timeout_s, **options)


def devices(size: int) -> list[str]:
    return [f"gpu:{rank}" for rank in range(size)]


def ones(rank: Communicator, size: int = 3) -> Any:
    return uploaded(np.ones(size, np.float32), device=rank.rank)


def pass_the_checked_calls(rank: Communicator) -> None:
    for _ in range(CHECKED_CALLS):
        rank.all_reduce(ones(rank))


def errors_of(group: NCCLGroup, function: Callable[[Communicator], Any]) -> list[Any]:
    """Runs a function on all ranks; returns what each returned or raised."""

    def run(rank: Communicator) -> Any:
        try:
            return function(rank)
        except gpuopt.GpuoptError as error:
            return error

    return group.run(run)


# Training


@pytest.mark.gpus(2)
def test_replicas_over_nccl_train_to_the_bits_of_replicas_in_threads(every_schedule: str) -> None:
    expected = train(MirroredStrategy(devices(2)))
    before = driver.counts().get("ncclAllReduce", 0) if driver.is_here() else 0
    trained = train(MirroredStrategy(devices(2), group=group_of()))
    assert trained == expected  # the sum of two is the same in any order
    if driver.is_here():
        assert driver.counts()["ncclAllReduce"] > before


@pytest.mark.gpus(2)
def test_the_guides_replicas_in_one_process_train_over_nccl() -> None:
    _, script = scripts_under("GPUs over NCCL")
    names: dict[str, Any] = {}
    exec(compile(script, "train.py", "exec"), names)
    before = driver.counts().get("ncclAllReduce", 0) if driver.is_here() else 0
    trained = train(names["strategy"])
    assert trained == train(MirroredStrategy(devices(2)))
    if driver.is_here():
        assert driver.counts()["ncclAllReduce"] > before


@pytest.mark.gpus(3)
def test_three_replicas_have_the_same_bits(every_schedule: str) -> None:
    bits = train(MirroredStrategy(devices(3), group=group_of(3)))["bits"]
    assert [bits[i : i + 3] for i in range(0, 12, 3)] == [[bits[i]] * 3 for i in range(0, 12, 3)]


# Order and memory


@pytest.mark.gpus(2)
def test_the_host_waits_for_nobody_after_the_checked_calls(every_schedule: str) -> None:
    may_come = threading.Event()

    def run(rank: Communicator) -> list[Any]:
        pass_the_checked_calls(rank)
        arrays = [uploaded(np.full(3, float(i)), device=rank.rank) for i in range(5)]
        if rank.rank == 1:
            assert may_come.wait(LONG_S)
        totals = [rank.all_reduce(array) for array in arrays]
        may_come.set()
        return [total.get().tolist() for total in totals]

    assert group_of().run(run) == [[[2.0 * step] * 3 for step in range(5)]] * 2


@pytest.mark.gpus(2)
def test_work_is_in_order_with_the_callers_stream(every_schedule: str) -> None:
    def run(rank: Communicator) -> tuple[Any, Any]:
        import cupy

        with cupy.cuda.Device(rank.rank), new_stream(rank.rank) as stream:
            array = cupy.full(1000, rank.rank + 1, np.float32)
            for _ in range(12):
                array += 1  # before the collective
                total = rank.all_reduce(array)
                array *= 0  # after it
                rank.broadcast(total, 1)
                array += total
            return array.get(stream=stream)[0], total.get(stream=stream)[-1]

    outcomes = group_of().run(run)
    host = [1.0, 2.0]
    for _ in range(12):
        total = sum(value + 1 for value in host)
        host = [total, total]
    assert outcomes == [(host[0], host[0])] * 2


@pytest.mark.gpus(2)
def test_arrays_may_be_dropped_as_soon_as_a_call_returns(every_schedule: str) -> None:
    def run(rank: Communicator) -> list[list[float]]:
        import cupy

        with cupy.cuda.Device(rank.rank):
            others, mine = new_stream(rank.rank), new_stream(rank.rank)
            with others:  # gpuopt hears of both streams
                rank.all_reduce(cupy.ones(8, np.float32))
            totals = []
            for step in range(2 * CHECKED_CALLS):
                array = uploaded(np.full(3000, step, np.float32), others, rank.rank)
                table = uploaded(np.full((10, 3), step, np.float32), others, rank.rank)
                others.synchronize()
                with mine:
                    rows = IndexedSlices(table, cupy.arange(10), (10, 3))
                    totals.append(rank.all_reduce(array))
                    totals.append(rank.all_gather_slices(rows).values)
                del array, table, rows
                with others:  # its pool gets the memory back
                    cupy.full(3000, np.nan, np.float32)
                    cupy.full((10, 3), np.nan, np.float32)
            mine.synchronize()
            return [total.get().ravel()[[0, -1]].tolist() for total in totals]

    steps = range(2 * CHECKED_CALLS)
    expected = [[factor * step] * 2 for step in steps for factor in (2.0, 1.0)]
    assert group_of().run(run) == [expected] * 2


@pytest.mark.gpus(2)
def test_arrays_in_host_memory_go_over_the_other_group() -> None:
    def run(rank: Communicator) -> list[Any]:
        mine = np.full(2, rank.rank + 1.0)
        rows = IndexedSlices(np.full((1, 2), rank.rank + 1.0), [rank.rank], (2, 2))
        return [
            rank.all_reduce(mine).tolist(),
            rank.batch_all_reduce([mine, mine])[1].tolist(),
            rank.all_gather_slices(rows).indices.tolist(),
            rank.broadcast(mine, 1).tolist(),
            rank.local.all_gather(rank.rank),
        ]

    assert group_of().run(run) == [[[3, 3], [3, 3], [0, 1], [2, 2], [0, 1]]] * 2


# Calls that do not match


@pytest.mark.gpus(2)
def test_with_check_every_call_is_compared() -> None:
    def run(rank: Communicator) -> None:
        for _ in range(3):
            pass_the_checked_calls(rank)
        for call in (
            lambda: rank.all_reduce(ones(rank, 3 + rank.rank)),
            lambda: rank.batch_all_reduce([ones(rank)] * (1 + rank.rank)),
            lambda: rank.broadcast(ones(rank), rank.rank),
        ):
            with pytest.raises(ValueError, match="all ranks must make the same call") as error:
                call()
            assert "on rank 0; " in str(error.value)
        assert rank.all_reduce(ones(rank)).get().tolist() == [2, 2, 2]

    group_of(check=True).run(run)


@pytest.mark.gpus(2)
def test_rows_are_compared_in_every_call() -> None:
    def run(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        values = ones(rank, 6).reshape(2, 3) if rank.rank else ones(rank, 6).reshape(3, 2)
        rows = uploaded(np.arange(len(values)), device=rank.rank)
        with pytest.raises(ValueError, match=r"\[2\]\] by int64.* on rank 0; .*\[3\]\] by int64"):
            rank.all_gather_slices(IndexedSlices(values, rows))

    group_of().run(run)


@pytest.mark.gpus(2)
def test_a_rank_that_brings_none_or_rows_is_told_to_all() -> None:
    strategy = MirroredStrategy(devices(2), group=group_of())
    w = strategy.variable(np.zeros((4, 2), np.float32), name="w")
    optimizer = gpuopt.GradientDescentOptimizer(1.0)

    def step() -> str:
        rank = strategy.communicator.rank
        gradient = ones(strategy.communicator, 8).reshape(4, 2)
        rows = IndexedSlices(gradient[:1], uploaded([0], device=rank), (4, 2))
        with pytest.raises(ValueError, match="same call") as error:
            optimizer.apply_gradients([(rows if rank else gradient, w.local)])
        return str(error.value)

    for told in strategy.run(step).values:
        assert "['w by ndarray']" in told
        assert "['w by IndexedSlices']" in told
    assert w.numpy().tolist() == [[0, 0]] * 4


@pytest.mark.gpus(2)
def test_an_array_of_another_gpu_is_refused() -> None:
    def run(rank: Communicator) -> None:
        other = uploaded(np.ones(3), device=1 - rank.rank)
        with pytest.raises(ValueError, match=f"rank {rank.rank} has gpu:{rank.rank}, got an array"):
            rank.all_reduce(other)

    group_of().run(run)


def test_a_group_needs_a_gpu_for_each_rank() -> None:
    for wrong in (["gpu:0", "gpu:0"], ["gpu:0", "cpu"]):
        with pytest.raises(ValueError, match="a GPU of its own for each rank"):
            NCCLGroup(wrong)
    with pytest.raises(ValueError, match="at least one GPU"):
        NCCLGroup([])
    with pytest.raises(ValueError, match="1 GPUs were given, and this process has 2 ranks"):
        NCCLGroup(["gpu:0"], ThreadGroup(2))
    with pytest.raises(ValueError, match="timeout_s"):
        NCCLGroup(["gpu:0"], timeout_s=0)


@pytest.mark.gpus(2)
def test_two_ranks_cannot_have_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of()
    monkeypatch.setattr(nccl_link, "place_of", lambda index: "0000:01:00.0")

    def run(rank: Communicator) -> None:
        with pytest.raises(ValueError, match="NCCL needs a GPU for each rank, got") as error:
            rank.all_reduce(ones(rank))
        assert "GPU 0000:01:00.0 of " in str(error.value)
        assert str(error.value).endswith("on rank 0, 1")

    group.run(run)


@pytest.mark.gpus(2)
def test_an_error_of_a_new_connection_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no network")

    group = group_of()
    monkeypatch.setattr(nccl_library.import_nccl(), "get_unique_id", refuse)
    with pytest.raises(WorkerFailedError, match="cannot begin the connection of gpu:0"):
        group.run(lambda rank: rank.all_reduce(ones(rank)))


@pytest.mark.gpus(2)
def test_hosts_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of()
    hosts = iter([Host("localhost", "one start"), Host("localhost", "another")])
    monkeypatch.setattr(nccl_link, "place_of", lambda index: "0000:01:00.0")
    monkeypatch.setattr(nccl, "this_host", lambda: next(hosts))
    outcomes = group.run(lambda rank: rank.all_reduce(ones(rank)).get().tolist())
    assert outcomes == [[2, 2, 2]] * 2


def test_runs_of_a_group_are_not_nested_and_communicators_end_with_them() -> None:
    group = group_of(1)
    with pytest.raises(RuntimeError, match="in a `run` of the same group"):
        group.run(lambda rank: group.run(lambda inner: None))
    [communicator] = group.run(lambda rank: rank)
    with pytest.raises(CancelledError, match="the run of rank 0 is over"):
        communicator.all_reduce(ones(communicator))


def test_a_capture_is_refused() -> None:
    def run(rank: Communicator) -> None:
        import cupy

        array = ones(rank)
        with cupy.cuda.Device(0), new_stream() as stream:
            stream.begin_capture()
            try:
                with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
                    rank.all_reduce(array)
            finally:
                stream.end_capture()

    group_of(1).run(run)


# Ranks that are missing


@pytest.mark.gpus(2)
def test_a_collective_that_one_rank_leaves_out_is_told_and_not_read() -> None:
    group = group_of(timeout_s=SHORT_S)
    variable = gpuopt.Variable(np.ones(3, np.float32), name="v", device="gpu:0")

    def run(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        if rank.rank == 0:
            total = rank.all_reduce(ones(rank))
            variable.assign(total)
            with pytest.raises(DeadlineExceededError, match="was not done within"):
                variable.numpy()  # ends when the collective is given up
            rank.all_reduce(ones(rank))

    started = time.monotonic()
    outcomes = errors_of(group, run)
    assert time.monotonic() - started < SHORT_S * 2 + 3
    assert isinstance(outcomes[0], CancelledError)
    assert "rank 1 has finished" in str(outcomes[0])
    assert "all_reduce('sum') of float32[3] was not done within 0.3 s" in str(outcomes[0])
    with pytest.raises(DeadlineExceededError, match="restore all variables from a checkpoint"):
        variable.numpy()
    # The next run makes new communicators.
    outcomes = errors_of(group, lambda rank: rank.all_reduce(ones(rank)).get().tolist())
    assert outcomes == [[2, 2, 2]] * 2
    assert variable.numpy().shape == (3,)


def test_the_time_limit_begins_when_the_stream_reaches_a_collective() -> None:
    link = group_of(1, timeout_s=SHORT_S)._links[0]

    def look_for(seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            link.look()
            time.sleep(0.01)
        return link.why_broken is None

    begin, end = SimpleNamespace(done=False), SimpleNamespace(done=False)
    pending = nccl_link._Pending("a late collective", begin)
    pending.end = end
    link._pending.append(pending)
    assert look_for(2 * SHORT_S)  # the stream has other work
    begin.done = True
    assert look_for(SHORT_S / 2)
    assert not look_for(SHORT_S)
    assert link.why_broken == "a late collective was not done within 0.3 s"


@pytest.mark.gpus(3)
def test_a_rank_that_hangs_is_named_by_those_that_wait_for_it() -> None:
    group = group_of(3, timeout_s=SHORT_S)
    may_end = threading.Event()

    def run(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        if rank.rank == 1:
            assert may_end.wait(LONG_S)
            return
        try:
            for _ in range(1000):
                rank.all_reduce(ones(rank))
                time.sleep(0.01)
        finally:
            if rank.rank == 0:
                time.sleep(SHORT_S)
            may_end.set()

    for outcome in errors_of(group, run)[::2]:
        assert isinstance(outcome, DeadlineExceededError)
        assert "all_reduce('sum') of float32[3] was not done within 0.3 s" in str(outcome)
        assert "rank 1 did not come" in str(outcome)


@pytest.mark.gpus(2)
def test_what_a_run_has_left_undone_is_told_by_the_next() -> None:
    group = group_of()

    def leave_one_out(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        if rank.rank == 0:
            rank.all_reduce(ones(rank, 5))

    group.run(leave_one_out)
    told = errors_of(group, lambda rank: rank.all_reduce(ones(rank)))
    assert isinstance(told[0], CancelledError)
    assert "float32[5] was not done: other ranks have ended without it" in str(told[0])


@pytest.mark.gpus(2)
def test_a_failure_reaches_the_others_and_the_next_run_succeeds() -> None:
    group = group_of()

    def fail(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        if rank.rank == 1:
            raise KeyError("no data")
        rank.all_reduce(ones(rank))  # never done
        with pytest.raises(WorkerFailedError, match="rank 1 has failed: KeyError: 'no data'"):
            rank.barrier()

    with pytest.raises(KeyError, match="no data"):
        group.run(fail)
    outcomes = group.run(lambda rank: rank.all_reduce(ones(rank)).get().tolist())
    assert outcomes == [[2, 2, 2]] * 2


@pytest.mark.gpus(2)
def test_a_call_that_is_interrupted_is_made_anew_in_the_next_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(timeout_s=SHORT_S)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def run(rank: Communicator) -> None:
        pass_the_checked_calls(rank)
        if rank.rank == 1:
            monkeypatch.setattr(group._links[1], "all_reduce", interrupt)
        total = rank.all_reduce(ones(rank))
        with pytest.raises(WorkerFailedError, match="rank 1 has failed: KeyboardInterrupt"):
            rank.barrier()
        del total

    with pytest.raises(KeyboardInterrupt):
        group.run(run)
    monkeypatch.undo()
    outcomes = group.run(lambda rank: rank.all_reduce(ones(rank)).get().tolist())
    assert outcomes == [[2, 2, 2]] * 2


def test_ctrl_c_at_any_moment_of_a_run_leaves_the_group_usable() -> None:
    mine = ones(SingleCommunicator())

    def run(rank: Communicator) -> Any:
        return rank.broadcast(rank.all_reduce(mine)).get().tolist()

    moment, left = 0, 0
    while not left:
        if moment % 5 == 0:  # or it is connected already
            group = NCCLGroup(["gpu:0"], SingleGroup())
        moment += 1
        files = "gpuopt/distributed/communicators", "gpuopt/locks", "contextlib"
        interrupted = InterruptAt(moment, inside=files)
        try:
            with interrupted:
                group.run(run)
        except Interrupt as error:
            kept = error  # with the traceback, and what its frames hold
        left = interrupted.left
        outcome: list[Any] = []
        other = threading.Thread(
            target=lambda group, to: to.append(group.run(run)), args=(group, outcome)
        )
        other.start()
        other.join(LONG_S)
        assert [*outcome, group.run(run)] == [[[1.0] * 3]] * 2, (moment, kept)
    assert moment > 50


def test_ctrl_c_when_ncclgroupstart_returns_ends_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = NCCLGroup(["gpu:0"], SingleGroup())
    [link] = group._links

    def run(rank: Communicator) -> Any:
        return rank.all_reduce(ones(rank)).get().tolist()

    group.run(run)
    # A program that a shell runs in the background ignores Ctrl-C, and has no handler.
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Of built-ins alone, as CuPy's own: the signal is handled when all have returned.
    calls = map(methodcaller("__call__"), [link._nccl.groupStart, _thread.interrupt_main])
    monkeypatch.setattr(link._nccl, "groupStart", partial(list, calls))
    try:
        with pytest.raises(KeyboardInterrupt):
            group.run(run)
    finally:
        signal.signal(signal.SIGINT, outer)
    monkeypatch.undo()
    assert group.run(run) == [[1.0] * 3]  # was never begun, and poison


@pytest.mark.gpus(2)
def test_a_gpu_that_never_connects_is_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(timeout_s=SHORT_S)
    released = threading.Event()
    link = group._links[1]
    original = link.connect

    def hang(*arguments: Any) -> None:
        assert released.wait(LONG_S)
        original(*arguments)

    monkeypatch.setattr(link, "connect", hang)

    def run(rank: Communicator) -> Any:
        try:
            return rank.all_reduce(ones(rank))
        finally:
            released.set()

    before = driver.counts() if driver.is_here() else {}
    outcomes = errors_of(group, run)
    assert "has not connected gpu:0, of rank 0, with 1 others within 0.3 s" in str(outcomes[0])
    assert "rank 1 did not come" in str(outcomes[0])
    assert isinstance(outcomes[0], DeadlineExceededError)
    # It connects in the end, with a thread that nobody waits for. `destroy` would wait for others.
    del group, link, outcomes
    calls = ("ncclCommInitRankConfig", "ncclCommAbort", "ncclCommDestroy")
    numbers: list[int] = []
    ends = time.monotonic() + LONG_S
    while driver.is_here() and numbers != [2, 2, 0] and time.monotonic() < ends:
        time.sleep(0.01)
        numbers = [driver.counts().get(call, 0) - before.get(call, 0) for call in calls]
    assert numbers == [2, 2, 0] or not driver.is_here()


@pytest.mark.gpus(2)
def test_a_rank_that_cannot_connect_is_named_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = group_of(timeout_s=SHORT_S)

    def fail(*arguments: Any) -> None:
        raise WorkerFailedError("NCCL cannot connect: no memory")

    monkeypatch.setattr(group._links[1], "connect", fail)
    told: SimpleQueue[str] = SimpleQueue()

    def run(rank: Communicator) -> None:
        try:
            rank.all_reduce(ones(rank))
        except gpuopt.GpuoptError as error:
            if rank.rank == 0:
                told.put(str(error))
            raise

    with pytest.raises(WorkerFailedError, match="no memory"):
        group.run(run)
    why = told.get(timeout=LONG_S)
    assert why.startswith("rank 1 has failed: WorkerFailedError: NCCL cannot connect: no memory; ")
    assert "has not connected gpu:0" in why


@pytest.mark.gpus(2)
@pytest.mark.driver  # a real GPU is of no use to a forked child, not even for an error
def test_a_forked_child_is_told_and_leaves_the_parents_communicators() -> None:
    group = group_of()
    total = group.run(lambda rank: rank.all_reduce(ones(rank)))
    wait_for_gpus()
    event = nccl_library.record_event()
    pending = nccl_link._Pending("a collective", event)
    pending.end = event
    group._links[0]._pending.append(pending)
    # Their ends would call CUDA.
    kept = [weakref.ref(each) for each in (event, *gpuopt.backends.gpu_backends)]
    del event, pending
    child = os.fork()
    if not child:
        status = 1
        try:
            assert all(each() for each in kept)
            group.run(lambda rank: rank.all_reduce(np.ones(1)))  # the host's memory is its own
            link = group._links[0]
            status = 0 if "forked" in str(link.why_broken) and link._comm is None else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = group.run(lambda rank: rank.all_reduce(ones(rank)).get().tolist())
    assert [array.get().tolist() for array in total] == again == [[2, 2, 2]] * 2


@pytest.mark.gpus(2)
@pytest.mark.driver  # as above
def test_a_child_forked_in_the_middle_of_a_call_lets_its_group_go() -> None:
    group = group_of()
    [link, _] = group._links
    is_calling, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        is_calling.set()
        assert may_end.wait(LONG_S)

    def run(rank: Communicator) -> None:
        rank.all_reduce(ones(rank))
        if rank.rank == 0:
            link.enqueue("a call", wait)

    others = threading.Thread(target=group.run, args=(run,))
    others.start()
    assert is_calling.wait(LONG_S)
    child = os.fork()
    if not child:
        signal.alarm(5)  # ends the child, if it waits for the parent's thread
        link.close()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    may_end.set()
    others.join()
    assert status == 0


@pytest.mark.gpus(2)
def test_a_group_that_is_dropped_lets_its_communicators_go() -> None:
    group = group_of()
    totals = group.run(lambda rank: rank.all_reduce(ones(rank)))
    links = group._links
    del group
    assert [link._comm for link in links] == [None, None]
    assert [total.get().tolist() for total in totals] == [[2, 2, 2]] * 2
