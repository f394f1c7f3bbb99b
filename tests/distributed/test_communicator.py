"""Ranks reduce, gather and broadcast alike over every communicator, and none waits for ever."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from communicator_kinds import (
    GROUPS,
    JOB_KIND,
    JOB_SIZE,
    KINDS,
    KINDS_AND_SIZES,
    LONG_S,
    MOST_RANKS,
    SHORT_S,
    everyone,
    group_of,
    is_here,
    meeting_of,
    run_on_ranks,
    same_sums,
    succeeded,
    with_marks,
)
from emulator import EmulatorLauncher

from gpuopt import CancelledError, DeadlineExceededError, IndexedSlices, WorkerFailedError, backends
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.device import Device, device_of
from gpuopt.distributed import Communicator, SingleCommunicator, ThreadCommunicator, ThreadGroup
from gpuopt.distributed.communicators import host, threads
from gpuopt.distributed.communicators.host import Host
from gpuopt.distributed.communicators.threads import run_threads

OnRanks = Callable[..., list[Any]]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Threads and the like; or, in each process of a job, MPI or torch.distributed."""
    return request.param


@pytest.fixture
def on_ranks(kind: str) -> OnRanks:
    return partial(run_on_ranks, kind)


# What every communicator does.

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int64, np.uint16]
kinds_and_sizes = pytest.mark.parametrize(("kind", "size"), KINDS_AND_SIZES)
in_this_process = pytest.mark.skipif(JOB_SIZE > 0, reason="it is about the ranks of one process")


OPS: dict[Any, Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@pytest.mark.value
@kinds_and_sizes
def test_all_reduce_folds_in_rank_order_to_the_same_bits(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.standard_normal((3, 4)).astype(np.float32) for _ in range(size)]

    def reduce_by_each(rank: Communicator) -> list[Any]:
        return [rank.all_reduce(arrays[rank.rank], op) for op in OPS]

    outcomes = succeeded(run_on_ranks(kind, size, reduce_by_each))
    for op, results in zip(OPS, map(list, zip(*outcomes, strict=True)), strict=True):
        assert same_sums(kind if op == "sum" else "exact", size, results, reduce(OPS[op], arrays))
        others = [result.copy() for result in results[1:]]
        results[0][:] = 0
        assert all(map(np.array_equal, results[1:], others))
        assert not any(np.shares_memory(*pair) for pair in zip(results, arrays, strict=True))


@pytest.mark.value
@pytest.mark.parametrize("bucket_bytes", [1, 256, 2**20])
def test_buckets_change_the_messages_and_not_the_sums(on_ranks: OnRanks, bucket_bytes: int) -> None:
    size = MOST_RANKS
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


@pytest.mark.value
@kinds_and_sizes
def test_any_dtype_is_summed_to_the_bits_of_a_sequential_replay(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    # Less than an MPI's smallest message, and more than most caches hold of one rank.
    for dtype, length in product(DTYPES, (7, 30_001)):
        arrays = [(50 * rng.standard_normal(length)).astype(dtype) for _ in range(size)]
        expected = arrays[0].copy()
        for array in arrays[1:]:
            expected = (expected + array).astype(dtype)

        def sum_up(rank: Communicator, arrays: Any = arrays) -> Any:
            return rank.all_reduce(arrays[rank.rank])

        results = succeeded(run_on_ranks(kind, size, sum_up))
        assert [result.dtype for result in results] == [dtype] * size
        assert same_sums(kind, size, results, expected), dtype


@pytest.mark.value
@kinds_and_sizes
def test_a_batch_is_summed_to_the_bits_of_a_sequential_replay(kind: str, size: int) -> None:
    rng = np.random.default_rng(size)
    shapes = [(300, 7), (5000,), (2,), (40_000,)]
    arrays = [
        [rng.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(size)
    ]
    expected = [reduce(np.add, of_ranks) for of_ranks in zip(*arrays, strict=True)]

    def sum_up(rank: Communicator) -> list[Any]:
        mine = [array.copy() for array in arrays[rank.rank]]
        totals = rank.batch_all_reduce(mine, bucket_bytes=50_000)
        for array, before in zip(mine, arrays[rank.rank], strict=True):
            np.testing.assert_array_equal(array, before)
        return totals

    results = succeeded(run_on_ranks(kind, size, sum_up))
    for *totals, replayed in zip(*results, expected, strict=True):
        assert same_sums(kind, size, totals, replayed)


def test_nan_and_infinity_reach_every_rank(on_ranks: OnRanks) -> None:
    values = np.tile(np.float32([1, np.nan, np.inf, -0.0]), 1000)
    mine = [values, np.ones_like(values)]

    def reduce(rank: Communicator) -> list[bytes]:
        return [rank.all_reduce(mine[rank.rank], op).tobytes() for op in ("sum", "min", "max")]

    expected = [f(values, mine[1]).tobytes() for f in (np.add, np.minimum, np.maximum)]
    assert succeeded(on_ranks(2, reduce)) == [expected] * 2


@kinds_and_sizes
def test_what_is_returned_may_be_written_to(kind: str, size: int) -> None:
    def write(rank: Communicator) -> list[Any]:
        mine = np.full((2, 3), rank.rank + 1.0)
        slices = IndexedSlices(mine, np.arange(2), (9, 3))
        gathered = rank.all_gather_slices(slices)
        [batch] = rank.batch_all_reduce([mine])
        for array in (gathered.values, gathered.indices, batch, rank.all_reduce(mine)):
            array[...] = 7
        rank.barrier()
        return [mine.tolist(), slices.indices.tolist()]

    expected = [[[[number + 1.0] * 3] * 2, [0, 1]] for number in range(size)]
    assert succeeded(run_on_ranks(kind, size, write)) == expected


def test_many_gathered_rows_stand_in_rank_order(on_ranks: OnRanks) -> None:
    def gather(rank: Communicator) -> tuple[Any, Any]:
        count = 4000 * rank.rank
        values = np.asfortranarray(np.arange(3 * count, dtype=np.float16).reshape(count, 3))
        gathered = rank.all_gather_slices(IndexedSlices(values, np.arange(count), (9000, 3)))
        return gathered.values, gathered.indices

    counts = [4000 * rank for rank in range(3)]
    for values, indices in succeeded(on_ranks(3, gather)):
        expected = [np.arange(3 * n, dtype=np.float16).reshape(n, 3) for n in counts]
        np.testing.assert_array_equal(values, np.concatenate(expected))
        np.testing.assert_array_equal(indices, np.concatenate([np.arange(n) for n in counts]))


def test_strided_arrays_are_broadcast_to(on_ranks: OnRanks) -> None:
    def broadcast(rank: Communicator) -> list[Any]:
        whole = np.full((60, 80), float(rank.rank))
        arrays = [np.asfortranarray(whole), whole[::2, 1::3], np.full((), float(rank.rank))]
        for array in arrays:
            assert rank.broadcast(array, 1) is array
        return [array.tolist() for array in arrays] + [whole[1::2].tolist()]

    ones = np.ones((60, 80))
    for rank, (ordered, strided, scalar, untouched) in enumerate(succeeded(on_ranks(2, broadcast))):
        assert ordered == ones.tolist()
        assert strided == ones[::2, 1::3].tolist()
        assert scalar == 1
        assert untouched == np.full((30, 80), float(rank)).tolist()


@pytest.mark.parametrize("kind", KINDS[:1])  # naive ranks have no GPUs
def test_arrays_on_a_gpu_are_reduced_and_gathered_there(kind: str) -> None:
    gpu = Device("gpu", 0)

    def run(rank: Communicator) -> list[Any]:
        with fake_cupy.cuda.Device(0):
            small = fake_cupy.full((2, 3), rank.rank, np.float32)
            large = fake_cupy.full(5000, rank.rank, np.float32)
            rows = IndexedSlices(small, fake_cupy.asarray(np.array([0, 1])), (9, 3))
            gathered = rank.all_gather_slices(rows)
            results = [
                rank.all_reduce(small),
                *rank.batch_all_reduce([small, large, small[:, :2]]),
                gathered.values,
                gathered.indices,
                rank.broadcast(large, 1),
            ]
            assert results[-1] is large
            assert all(device_of(result) is gpu for result in results)
            return [fake_cupy.host_memory(result).copy() for result in results]

    with backends.using(gpu, CudaBackend(gpu, EmulatorLauncher(xp=fake_cupy))):
        outcomes = succeeded(run_on_ranks(kind, 2, run))
    for total, *batch, values, indices, broadcast in outcomes:
        assert [total.tolist(), batch[2].tolist()] == [[[1] * 3] * 2, [[1] * 2] * 2]
        assert [batch[0].tolist(), batch[1].tolist()] == [[[1] * 3] * 2, [1] * 5000]
        assert values.tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        assert indices.tolist() == [0, 1, 0, 1]
        assert broadcast.tolist() == [1] * 5000


def test_small_arrays_of_a_dtype_share_a_message() -> None:
    calls = []

    class Counting(SingleCommunicator):
        def all_reduce(self, array: Any, op: Any = "sum") -> Any:
            calls.append((array.dtype, array.size))
            return super().all_reduce(array, op)

    many = [np.ones(4, np.float32)] * 5 + [np.ones(17, np.float64)] * 2
    Counting().batch_all_reduce(many, bucket_bytes=256)
    # Padded to 128 bytes: two arrays of 4 float32 fit into 256, and one of 17 float64.
    assert sorted(size for _, size in calls) == [4, 17, 17, 64, 64]
    with pytest.raises(ValueError, match="bucket_bytes"):
        Counting().batch_all_reduce(many, bucket_bytes=0)


def test_arrays_that_share_a_message_begin_at_whole_cache_lines() -> None:
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64):
        many = [rng.integers(-9, 0, size).astype(dtype) for size in (1, 64, 65, 0, 31, 2)]
        # "max" would find a padding of 0.
        results = SingleCommunicator().batch_all_reduce(many, op="max")
        addresses = [result.ctypes.data for result in results if result.size]
        assert {(address - addresses[0]) % 128 for address in addresses} == {0}
        for result, expected in zip(results, many, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_strided_arrays_are_reduced_by_position(on_ranks: OnRanks) -> None:
    base = np.arange(12, dtype=np.float32).reshape(3, 4)

    def reduce(rank: Communicator) -> list[Any]:
        # In C's order, in Fortran's, and every other column.
        mine = [base, np.asfortranarray(base), np.repeat(base, 2, axis=1)[:, ::2]][rank.rank]
        batch = rank.batch_all_reduce([mine, mine], bucket_bytes=2**20)
        return [rank.all_reduce(mine), *batch]

    for results in succeeded(on_ranks(3, reduce)):
        assert [result.tolist() for result in results] == [(3 * base).tolist()] * 3


def test_no_arrays_are_a_batch_too(on_ranks: OnRanks) -> None:
    assert succeeded(on_ranks(2, lambda rank: rank.batch_all_reduce([]))) == [[], []]


@kinds_and_sizes
def test_gathered_values_stand_in_rank_order(kind: str, size: int) -> None:
    def gather(rank: Communicator) -> list[Any]:
        gathered = rank.all_gather({"rank": rank.rank, "values": "ab" * 50_000 * rank.rank})
        gathered.append("mine")
        return [gathered, rank.all_gather(len(gathered), "lengths")]

    values = [{"rank": i, "values": "ab" * 50_000 * i} for i in range(size)]
    expected = [[*values, "mine"], [size + 1] * size]
    assert succeeded(run_on_ranks(kind, size, gather)) == [expected] * size


@kinds_and_sizes
def test_ranks_of_one_process_are_a_group_that_passes_objects_on(kind: str, size: int) -> None:
    of_process = size if kind in GROUPS else 1
    things = [object() for _ in range(of_process)]

    def gather(rank: Communicator) -> list[bool]:
        local = rank.local
        assert (local.rank, local.size) == (rank.rank % of_process, of_process)
        gathered = local.all_gather(things[local.rank])
        return [got is thing for got, thing in zip(gathered, things, strict=True)]

    assert succeeded(run_on_ranks(kind, size, gather)) == [[True] * of_process] * size


def test_gathered_rows_stand_in_rank_order(on_ranks: OnRanks) -> None:
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


@kinds_and_sizes
def test_broadcast_overwrites_in_place(kind: str, size: int) -> None:
    for root in {0, size - 1}:
        arrays = [np.full(3, rank, np.float32) for rank in range(size)]

        def broadcast(rank: Communicator, root: int = root, arrays: Any = arrays) -> Any:
            result = rank.broadcast(arrays[rank.rank], root)
            assert result is arrays[rank.rank]
            result += rank.rank  # must not be seen by the others
            return result

        for rank, result in enumerate(succeeded(run_on_ranks(kind, size, broadcast))):
            assert result.tolist() == [root + rank] * 3


def test_no_rank_passes_a_barrier_early(on_ranks: OnRanks) -> None:
    def run(rank: Communicator) -> tuple[float, float]:
        time.sleep(0.02 * rank.rank)
        came = time.monotonic()
        rank.barrier()
        return came, time.monotonic()

    came, passed = zip(*succeeded(on_ranks(3, run)), strict=True)
    assert min(passed) >= max(came)


def test_many_rounds_do_not_mix(on_ranks: OnRanks) -> None:
    def run(rank: Communicator) -> list[float]:
        return [float(rank.all_reduce(np.float64([step + rank.rank]))[0]) for step in range(300)]

    for result in succeeded(on_ranks(3, run)):
        assert result == [3 * step + 3 for step in range(300)]


Case = tuple[Callable[..., Any], Sequence[str]]
MISMATCHES: list[Case] = [
    (lambda rank, i: rank.all_reduce(np.zeros(2 + i)), ["float64[2]", "float64[3]"]),
    (lambda rank, i: rank.all_reduce(np.zeros(2, "f4f8"[2 * i :][:2])), ["float32[2]"]),
    (lambda rank, i: rank.all_reduce(np.zeros(2), ("min", "max")[i]), ["'min'", "'max'"]),
    (lambda rank, i: rank.barrier() if i else rank.all_reduce(np.zeros(2)), ["barrier"]),
    (lambda rank, i: rank.barrier(("one", "two")[i]), ["one", "two"]),
    (lambda rank, i: rank.all_gather(0, ("one", "two")[i]), ["one", "two"]),
    (lambda rank, i: rank.broadcast(np.zeros(2), i), ["from 0", "from 1"]),
    # As many bytes, in other shapes.
    (
        lambda rank, i: rank.batch_all_reduce([np.zeros(2 + i), np.zeros(3 - i)]),
        ["float64[2], float64[3]", "float64[3], float64[2]"],
    ),
    (lambda rank, i: rank.batch_all_reduce([np.zeros(2)][i:]), ["[float64[2]]", "[]"]),
    (
        lambda rank, i: rank.batch_all_reduce([np.zeros(2)], what=f"gradients of {i}"),
        ["gradients of 0", "gradients of 1"],
    ),
    (
        lambda rank, i: rank.all_gather_slices(IndexedSlices(np.zeros((1, 2 + i)), [0])),
        ["[2]", "[3]"],
    ),
    (
        lambda rank, i: rank.all_gather_slices(
            IndexedSlices(np.zeros((1, 2)), [0]), what=f"rows of {i}"
        ),
        ["rows of 0", "rows of 1"],
    ),
]


def test_calls_that_do_not_match_are_an_error_on_every_rank_and_the_group_goes_on(
    on_ranks: OnRanks,
) -> None:
    def run(rank: Communicator) -> list[int]:
        for call, named in MISMATCHES:
            with pytest.raises(ValueError, match="same call") as error:
                call(rank, rank.rank)
            assert all(name in str(error.value) for name in named)
        return rank.all_gather(rank.rank)

    assert succeeded(on_ranks(2, run)) == [[0, 1]] * 2


@pytest.mark.parametrize(
    "kind", KINDS if JOB_SIZE else [with_marks(kind, ranks=1) for kind in GROUPS]
)
def test_wrong_arguments_are_refused(kind: str) -> None:
    def call(communicator: Communicator) -> None:
        with pytest.raises(ValueError, match="op must be"):
            communicator.all_reduce(np.zeros(1), "mean")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="root must be a rank from 0 to 0, got 1"):
            communicator.broadcast(np.zeros(1), 1)

    succeeded(run_on_ranks(kind, 1, call))


@in_this_process
def test_a_group_needs_a_rank() -> None:
    for make in (ThreadGroup, ThreadCommunicator.group):
        with pytest.raises(ValueError, match="at least 1 rank, got 0"):
            make(0)
        with pytest.raises(ValueError, match="timeout_s"):
            make(1, float("inf"))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda rank: rank.barrier("the end"), "the end"),
        (lambda rank: rank.broadcast(np.zeros(2), 1), "broadcast from 1 of float64[2]"),
        (
            lambda rank: rank.batch_all_reduce([np.zeros(2)]),
            "batch_all_reduce('sum') of [float64[2]]",
        ),
        (
            lambda rank: rank.all_gather_slices(IndexedSlices(np.zeros((1, 2)), [0])),
            "all_gather_slices of float64",
        ),
    ],
)
def test_a_rank_that_never_comes_is_named_within_the_deadline(
    kind: str, call: Callable[[Communicator], Any], named: str
) -> None:
    meet = meeting_of(kind, 3)

    def run(rank: Communicator) -> float:
        meet()
        started = time.monotonic()
        if rank.rank != 1:
            with pytest.raises(DeadlineExceededError) as error:
                call(rank)
            assert named in str(error.value)
            # On a busy machine, more of them may come too late.
            assert re.search(r"rank (0, )?1(, 2)? did not come within 0\.2 s", str(error.value))
        waited = time.monotonic() - started
        meet()
        return waited

    first, _, last = succeeded(run_on_ranks(kind, 3, run, timeout_s=SHORT_S))
    # Threads give up together, when the first of them does.
    assert SHORT_S <= max(first, last) < SHORT_S + 2


def test_a_rank_that_fails_is_an_error_for_the_others_now_and_later(kind: str) -> None:
    noticed_by: list[int] = []

    def run(rank: Communicator) -> None:
        if rank.rank == 1:
            time.sleep(0.05)
            raise SystemExit("no data")
        for _ in range(2):
            with pytest.raises(WorkerFailedError, match="rank 1 has failed: SystemExit: no data"):
                rank.barrier()
        noticed_by.append(rank.rank)

    with pytest.raises(SystemExit):
        run_on_ranks(kind, 2, run)
    assert noticed_by == ([0] if is_here(kind, 0) else [])


class Unwritable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no file \udcff"), r"ValueError: no file \\udcff"),
        (Unwritable(), "Unwritable: <str.. of Unwritable raised ValueError>"),
    ],
)
def test_a_failure_is_told_to_the_others_whatever_its_text(
    error: Exception, told: str, kind: str
) -> None:
    group = group_of(kind, 2)

    def run(rank: Communicator) -> None:
        if rank.rank == 1:
            raise error
        with pytest.raises(WorkerFailedError, match=told):
            rank.barrier()

    if group is not None and is_here(kind, 1):
        with pytest.raises(type(error)) as raised:
            group.run(run)
        assert raised.value is error
    elif group is not None:
        group.run(run)


def test_a_rank_that_has_finished_is_not_waited_for(on_ranks: OnRanks) -> None:
    def run(rank: Communicator) -> str:
        if rank.rank == 1:
            time.sleep(0.05)
            return "finished"
        for _ in range(2):
            with pytest.raises(CancelledError, match="rank 1 has finished"):
                rank.barrier()
        return "noticed"

    assert on_ranks(2, run) == ["noticed", "finished"]


def test_a_group_runs_again_after_a_failure(kind: str) -> None:
    group = group_of(kind, 2)

    def fail(rank: Communicator) -> None:
        rank.barrier()
        if rank.rank == 0:
            raise KeyError("lost")
        rank.all_reduce(np.zeros(100_000))

    if group is not None:
        with pytest.raises(KeyError if is_here(kind, 0) else WorkerFailedError, match="lost"):
            group.run(fail)
        gathered = group.run(lambda rank: rank.all_gather(rank.rank))
        assert gathered == [[0, 1]] * group.local_size
        assert group.size == 2


# What processes do besides.

in_a_job = pytest.mark.skipif(JOB_SIZE == 0, reason="it is about processes: see test_mpi_jobs.py")


@pytest.mark.skipif(JOB_KIND != "mpi", reason="it is about MPI: see test_mpi_jobs.py")
def test_blocks_beyond_what_mpi_counts_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpuopt.distributed.communicators import mail

    monkeypatch.setattr(mail, "_PIECE_BYTES", 1000)
    values = np.arange(10_001, dtype=np.float32)

    def reduce(rank: Communicator) -> Any:
        with pytest.raises(ValueError, match="same call"):  # the pieces are dropped
            rank.all_reduce(values[rank.rank :])
        return rank.all_reduce(values)

    for total in succeeded(run_on_ranks(JOB_KIND, 3, reduce)):
        np.testing.assert_array_equal(total, 3 * values)


@in_a_job
@pytest.mark.parametrize(("bucket", "size"), [(0, 2), (4, 2), (2, 3)])
def test_a_rank_that_fails_in_the_middle_of_a_sum_is_named_and_the_group_runs_again(
    bucket: int, size: int
) -> None:
    arrays = [np.ones(20_000, np.float32) for _ in range(5)]
    harmless = [array.copy() for array in arrays]
    # In the share that rank 1 adds up.
    arrays[bucket][20_000 // size + 1] = 3e38

    def fail(rank: Communicator) -> str:
        with np.errstate(over="raise"), pytest.raises(Exception) as error:  # noqa: PT011
            rank.batch_all_reduce(arrays, bucket_bytes=80_000)
        with pytest.raises(WorkerFailedError, match="rank 1"):
            rank.barrier()
        return f"{type(error.value).__name__}: {error.value}"

    def reduce(rank: Communicator) -> list[float]:
        return [float(total.sum()) for total in rank.batch_all_reduce(harmless)]

    for _ in range(3):
        told = succeeded(run_on_ranks(JOB_KIND, size, fail))
        cause = "FloatingPointError: overflow encountered in add"
        assert told.pop(1) == cause
        assert told == [f"WorkerFailedError: rank 1 has failed: {cause}"] * (size - 1)
        sums = succeeded(run_on_ranks(JOB_KIND, size, reduce))
        assert sums == [[20_000.0 * size] * 5] * size


@in_a_job
def test_after_a_sum_that_a_rank_came_too_late_for_the_group_runs_again() -> None:
    arrays = [np.full(20_000, float(i), np.float32) for i in range(5)]
    deadline_s = 1.0

    def come_late(rank: Communicator) -> str:
        if rank.rank == 1:
            time.sleep(1.3 * deadline_s)
        with pytest.raises((DeadlineExceededError, WorkerFailedError)) as error:
            rank.batch_all_reduce(arrays, bucket_bytes=80_000)
        return str(error.value)

    def reduce(rank: Communicator) -> list[float]:
        return [float(total.sum()) for total in rank.batch_all_reduce(arrays)]

    told = succeeded(run_on_ranks(JOB_KIND, 3, come_late, timeout_s=deadline_s))
    assert all("rank 1 did not come within 1 s" in told[rank] for rank in (0, 2))
    sums = succeeded(run_on_ranks(JOB_KIND, 3, reduce, timeout_s=deadline_s))
    assert sums == [[60_000.0 * i for i in range(5)]] * 3


@in_a_job
def test_python_objects_in_an_array_are_not_sent_as_addresses() -> None:
    def reduce(rank: Communicator) -> None:
        for call in (rank.all_reduce, rank.broadcast, lambda array: rank.batch_all_reduce([array])):
            with pytest.raises(TypeError, match="an array of object holds Python objects"):
                call(np.array([{}, []], object))
        with pytest.raises(TypeError, match="an array of object holds Python objects"):
            rank.batch_all_reduce([np.zeros(9000), np.array([{}] * 9000, object)])
        assert rank.all_reduce(np.ones(9000)).sum() == 18_000  # nothing had been sent

    succeeded(run_on_ranks(JOB_KIND, 2, reduce))


@in_a_job
def test_an_array_that_must_not_be_written_is_not_broadcast_to() -> None:
    values = np.broadcast_to(np.float32(1), (3,))

    def broadcast(rank: Communicator) -> None:
        if rank.rank == 1:
            with pytest.raises(ValueError, match="read-only array"):
                rank.broadcast(values)
            raise KeyError("noticed")
        with pytest.raises(WorkerFailedError, match="KeyError: 'noticed'"):
            rank.broadcast(values)

    group = group_of(JOB_KIND, 2)
    if group is not None and is_here(JOB_KIND, 0):
        group.run(broadcast)
    elif group is not None:
        with pytest.raises(KeyError):
            group.run(broadcast)


@in_a_job
def test_long_calls_that_differ_at_their_end_are_told_in_full() -> None:
    def reduce(rank: Communicator) -> str:
        with pytest.raises(ValueError, match="same call") as error:
            rank.batch_all_reduce([np.zeros(2)] * 500 + [np.zeros(rank.rank)])
        return str(error.value)

    for told in succeeded(run_on_ranks(JOB_KIND, 2, reduce)):
        assert "float64[2], float64[0]] in buckets" in told
        assert "float64[2], float64[1]] in buckets" in told


@in_a_job
def test_runs_of_a_group_are_not_nested() -> None:
    group = group_of(JOB_KIND, 2)
    if group is not None:
        with pytest.raises(RuntimeError, match="same group: in it, use its communicator"):
            group.run(lambda rank: group.run(lambda rank: None))
        assert group.run(lambda rank: rank.size) == [2]


@in_a_job
def test_a_communicator_is_of_no_use_after_its_run() -> None:
    group = group_of(JOB_KIND, 2)
    if group is not None:
        [communicator] = group.run(lambda rank: rank)
        with pytest.raises(CancelledError, match=r"the run of rank \d is over"):
            communicator.barrier()


# What threads do besides.


@in_this_process
def test_a_reduction_that_takes_too_long_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def to_device_slowly(array: Any, device: Device) -> Any:
        assert may_end.wait(LONG_S)
        return array

    monkeypatch.setattr(threads, "to_device", to_device_slowly)

    def run(rank: Communicator) -> float:
        started = time.monotonic()
        with pytest.raises(
            DeadlineExceededError, match=r"all_reduce.*float64\[2\] was not done within 0\.2 s"
        ):
            rank.all_reduce(np.zeros(2))
        may_end.set()
        return time.monotonic() - started

    assert SHORT_S <= max(ThreadGroup(2, SHORT_S).run(run)) < SHORT_S + 2


@in_this_process
def test_a_failure_in_a_thread_is_the_cause_of_the_others_error() -> None:
    cause = ZeroDivisionError("no data")

    def run(rank: Communicator) -> None:
        if rank.rank == 1:
            raise cause
        try:
            rank.barrier()
        except WorkerFailedError as error:
            causes.append(error.__cause__)

    causes: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        ThreadGroup(2).run(run)
    assert causes == [cause]


@in_this_process
def test_closing_cancels_who_waits_and_who_comes_later() -> None:
    group = ThreadCommunicator.group(2, LONG_S)
    threading.Timer(0.05, group[1].close).start()
    for _ in range(2):
        with pytest.raises(CancelledError, match="closed"):
            group[0].all_reduce(np.zeros(3))


@in_this_process
def test_threads_return_in_order_and_the_first_cause_is_raised() -> None:
    assert run_threads([lambda: "a", lambda: "b"], lambda: None) == ["a", "b"]

    def noticed() -> None:
        raise WorkerFailedError("rank 1 has failed")

    def cause() -> None:
        time.sleep(0.05)
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"):
        run_threads([noticed, cause], lambda: None)


@in_this_process
def test_a_thread_that_never_ends_does_not_hold_up_anothers_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    def fail() -> None:
        raise KeyError("cause")

    started = time.monotonic()
    with pytest.raises(KeyError):
        run_threads([fail, lambda: release.wait(LONG_S)], lambda: None, SHORT_S)
    assert time.monotonic() - started < SHORT_S + 2
    assert "threads [1] have not ended within 0.2 s" in caplog.text
    release.set()


@in_a_job
def test_the_ranks_of_hosts_of_one_name_are_counted_on_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = everyone().rank
    monkeypatch.setattr(host, "this_host", lambda: Host("localhost", f"start {rank % 2}"))
    assert type(everyone())(LONG_S).rank_on_host == rank // 2
