"""Ranks reduce, gather and broadcast alike, and none waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpuopt import CancelledError, DeadlineExceededError, IndexedSlices, WorkerFailedError
from gpuopt.distributed import Communicator, SingleCommunicator, ThreadCommunicator
from gpuopt.distributed.in_process import run_threads

SHORT_S = 0.2
LONG_S = 20.0


def on_ranks(
    size: int, function: Callable[[Communicator], Any], timeout_s: float = LONG_S
) -> list[Any]:
    """Runs the function on every rank; returns what each returned or raised."""
    outcomes: list[Any] = [None] * size

    def run(communicator: Communicator) -> None:
        try:
            outcomes[communicator.rank] = function(communicator)
        except Exception as error:
            outcomes[communicator.rank] = error

    group: list[Any] = (
        [SingleCommunicator()] if size == 1 else ThreadCommunicator.group(size, timeout_s)
    )
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in group]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return outcomes


def succeeded(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_all_reduce_folds_in_rank_order_to_the_same_bits(size: int, op: Any) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(size)]
    expected = arrays[0]
    for array in arrays[1:]:
        expected = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op](expected, array)
    results = succeeded(on_ranks(size, lambda rank: rank.all_reduce(arrays[rank.rank], op)))
    assert all(np.array_equal(result, expected) for result in results)
    results[0][:] = 0
    assert all(np.array_equal(result, expected) for result in results[1:])
    assert size == 1 or not np.shares_memory(results[1], arrays[1])


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_buckets_change_the_messages_and_not_the_sums(size: int, bucket_bytes: int) -> None:
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (2, 5), (0, 4), (7,), (1, 1)]
    dtypes = [np.float32, np.float64, np.float32, np.float32, np.float16, np.float64]
    arrays = [
        [rng.integers(-9, 9, shape).astype(d) for shape, d in zip(shapes, dtypes, strict=True)]
        for _ in range(size)
    ]
    results = succeeded(
        on_ranks(
            size, lambda rank: rank.batch_all_reduce(arrays[rank.rank], bucket_bytes=bucket_bytes)
        )
    )
    for result in results:
        for got, *parts in zip(result, *arrays, strict=True):
            expected = np.sum(parts, axis=0)
            assert got.shape == expected.shape
            assert got.dtype == parts[0].dtype
            assert np.array_equal(got, expected)


def test_small_arrays_of_a_dtype_share_a_message() -> None:
    calls = []

    class Counting(SingleCommunicator):
        def all_reduce(self, array: Any, op: Any = "sum") -> Any:
            calls.append((array.dtype, array.size))
            return super().all_reduce(array, op)

    many = [np.ones(4, np.float32)] * 5 + [np.ones(3, np.float64)] * 2
    Counting().batch_all_reduce(many, bucket_bytes=32)
    assert sorted(size for _, size in calls) == [3, 3, 4, 8, 8]
    with pytest.raises(ValueError, match="bucket_bytes"):
        Counting().batch_all_reduce(many, bucket_bytes=0)


def test_gathered_rows_stand_in_rank_order() -> None:
    def gather(rank: Communicator) -> IndexedSlices:
        count = rank.rank  # rank 0 brings none
        values = np.full((count, 2), float(rank.rank), np.float32)
        mine = IndexedSlices(values, np.arange(count), (9, 2))
        gathered = rank.all_gather_slices(mine)
        values[:] = -1  # must not be seen by the others
        return gathered

    for gathered in succeeded(on_ranks(3, gather)):
        assert gathered.indices.tolist() == [0, 0, 1]
        assert gathered.values[:, 0].tolist() == [1, 2, 2]
        assert gathered.dense_shape == (9, 2)


@pytest.mark.parametrize(("size", "root"), [(1, 0), (3, 0), (3, 2)])
def test_broadcast_overwrites_in_place(size: int, root: int) -> None:
    arrays = [np.full(3, rank, np.float32) for rank in range(size)]
    results = succeeded(on_ranks(size, lambda rank: rank.broadcast(arrays[rank.rank], root)))
    for array, result in zip(arrays, results, strict=True):
        assert result is array
        assert array.tolist() == [root] * 3


def test_no_rank_passes_a_barrier_early() -> None:
    passed: list[int] = []
    come: list[int] = []

    def run(rank: Communicator) -> None:
        time.sleep(0.02 * rank.rank)
        come.append(rank.rank)
        rank.barrier()
        passed.append(len(come))

    succeeded(on_ranks(3, run))
    assert passed == [3, 3, 3]


def test_many_rounds_do_not_mix() -> None:
    def run(rank: Communicator) -> list[float]:
        return [float(rank.all_reduce(np.float64([step + rank.rank]))[0]) for step in range(300)]

    for result in succeeded(on_ranks(3, run)):
        assert result == [3 * step + 3 for step in range(300)]


def test_calls_that_do_not_match_are_an_error_on_every_rank() -> None:
    outcomes = on_ranks(2, lambda rank: rank.all_reduce(np.zeros(2 + rank.rank)))
    for outcome in outcomes:
        assert isinstance(outcome, ValueError)
        assert "float64[2]" in str(outcome)
        assert "float64[3]" in str(outcome)
    outcomes = on_ranks(2, lambda r: r.barrier() if r.rank else r.all_reduce(np.zeros(2)))
    assert all(isinstance(outcome, ValueError) for outcome in outcomes)


@pytest.mark.parametrize("communicator", [SingleCommunicator(), ThreadCommunicator.group(1)[0]])
def test_wrong_arguments_are_refused(communicator: Any) -> None:
    with pytest.raises(ValueError, match="op must be"):
        communicator.all_reduce(np.zeros(1), "mean")
    with pytest.raises(ValueError, match="root must be a rank from 0 to 0, got 1"):
        communicator.broadcast(np.zeros(1), 1)


def test_a_rank_that_never_comes_is_named_within_the_deadline() -> None:
    started = time.monotonic()
    outcomes = on_ranks(3, lambda r: r.barrier() if r.rank != 1 else None, timeout_s=SHORT_S)
    assert SHORT_S <= time.monotonic() - started < SHORT_S + 2
    for rank in (0, 2):
        assert isinstance(outcomes[rank], DeadlineExceededError)
        assert "barrier: rank 1 did not come within 0.2 s" in str(outcomes[rank])


def test_a_reduction_that_takes_too_long_is_given_up_in_time() -> None:
    group = ThreadCommunicator.group(2, SHORT_S)
    release = threading.Event()
    outcome: list[Any] = []

    def wait_for_the_other() -> None:
        started = time.monotonic()
        try:
            group[0].meeting.meet(0, "slow", None, lambda things: None)
        except DeadlineExceededError as error:
            outcome.append((error, time.monotonic() - started))

    waiter = threading.Thread(target=wait_for_the_other, daemon=True)
    waiter.start()
    while not group[0].meeting._brought:
        time.sleep(0.001)

    def combine(things: list[Any]) -> None:
        assert release.wait(LONG_S)

    def reduce_slowly() -> None:
        with pytest.raises(DeadlineExceededError):
            group[1].meeting.meet(1, "slow", None, combine)

    slow = threading.Thread(target=reduce_slowly, daemon=True)
    slow.start()
    waiter.join(LONG_S)
    release.set()
    slow.join(LONG_S)
    error, waited = outcome[0]
    assert "slow was not done within 0.2 s" in str(error)
    assert waited < SHORT_S + 2


def test_a_rank_that_fails_is_an_error_for_the_others() -> None:
    group = ThreadCommunicator.group(2, LONG_S)
    cause = ZeroDivisionError("no data")
    timer = threading.Timer(0.05, lambda: group[1].meeting.fail(1, cause))
    timer.start()
    with pytest.raises(WorkerFailedError, match="rank 1 has failed: ZeroDivisionError: no data"):
        group[0].barrier()
    with pytest.raises(WorkerFailedError) as later:
        group[0].barrier()
    assert later.value.__cause__ is cause


def test_closing_cancels_who_waits_and_who_comes_later() -> None:
    group = ThreadCommunicator.group(2, LONG_S)
    threading.Timer(0.05, group[1].close).start()
    for _ in range(2):
        with pytest.raises(CancelledError, match="closed"):
            group[0].all_reduce(np.zeros(3))


def test_threads_return_in_order_and_the_first_cause_is_raised() -> None:
    assert run_threads([lambda: "a", lambda: "b"]) == ["a", "b"]

    def noticed() -> None:
        raise WorkerFailedError("rank 1 has failed")

    def cause() -> None:
        time.sleep(0.05)
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        run_threads([noticed, cause])


def test_a_thread_that_never_ends_does_not_hold_up_anothers_error() -> None:
    release = threading.Event()

    def fail() -> None:
        raise KeyError("cause")

    started = time.monotonic()
    with pytest.raises(KeyError):
        run_threads([fail, lambda: release.wait(LONG_S)], timeout_s=SHORT_S)
    assert time.monotonic() - started < SHORT_S + 2
    release.set()
