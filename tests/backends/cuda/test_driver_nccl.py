"""The driver's NCCL computes what numpy does, and sees the defects that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import driver
import ml_dtypes
import numpy as np
import pytest

SIZE = 3
pytestmark = [pytest.mark.gpu, pytest.mark.gpus(SIZE), pytest.mark.driver]

FLOAT, SUM = 7, 0
TYPES = {
    **{np.int8: 0, np.uint8: 1, np.int32: 2, np.uint32: 3, np.int64: 4, np.uint64: 5},
    **{np.float16: 6, np.float32: 7, np.float64: 8, ml_dtypes.bfloat16: 9},
}


@pytest.fixture
def cupy() -> Iterator[Any]:
    import cupy
    import cupy.cuda.nccl

    yield cupy
    driver.set_policy("oldest")


@pytest.fixture
def comms(cupy: Any) -> Iterator[list[Any]]:
    """A communicator for each GPU, connected: the first collective would wait for all of them."""
    made = cupy.cuda.nccl.NcclCommunicator.initAll(SIZE)
    arrays = [on(cupy, rank, np.zeros(1, np.float32)) for rank in range(SIZE)]
    reduce_all(cupy, made, arrays)
    driver.synchronize()
    yield made
    for comm in made:
        comm.abort()


def on(cupy: Any, rank: int, values: Any) -> Any:
    with cupy.cuda.Device(rank):
        return cupy.asarray(values)


def together(cupy: Any, call: Callable[[int], None]) -> None:
    cupy.cuda.nccl.groupStart()
    try:
        for rank in range(SIZE):
            call(rank)
    finally:
        cupy.cuda.nccl.groupEnd()


def reduce_all(cupy: Any, comms: list[Any], arrays: list[Any]) -> None:
    def call(rank: int) -> None:
        at = arrays[rank].data.ptr
        comms[rank].allReduce(at, at, arrays[rank].size, FLOAT, SUM, 0)

    together(cupy, call)


def check_report(words: str, number: int = 1) -> None:
    reports = driver.take_reports()
    assert len(reports) == number, reports
    assert all(words in report for report in reports)


@pytest.mark.parametrize("op", range(4))
def test_elements_are_reduced_as_by_numpy(
    cupy: Any, comms: list[Any], op: int, every_schedule: str
) -> None:
    rng = np.random.default_rng(op)
    for dtype, number in TYPES.items():
        # Exact in every order, and integers wrap.
        hosts = [rng.integers(0, 5, 7).astype(dtype) * dtype(3) for _ in range(SIZE)]
        arrays = [on(cupy, rank, host) for rank, host in enumerate(hosts)]
        results = [on(cupy, rank, np.zeros(7, dtype)) for rank in range(SIZE)]

        def call(
            rank: int, arrays: Any = arrays, results: Any = results, number: int = number
        ) -> None:
            buffers = arrays[rank].data.ptr, results[rank].data.ptr
            comms[rank].allReduce(*buffers, 7, number, op, 0)

        together(cupy, call)
        expected = reduce([np.add, np.multiply, np.maximum, np.minimum][op], hosts)
        for result in results:
            assert result.get().tobytes() == expected.tobytes()


def test_other_collectives_move_what_they_say(cupy: Any, comms: list[Any]) -> None:
    hosts = [np.arange(6, dtype=np.float32) + 10 * rank for rank in range(SIZE)]
    arrays = [on(cupy, rank, host) for rank, host in enumerate(hosts)]

    def results(call: Callable[[Any, int, int], None], length: int) -> list[Any]:
        targets = [on(cupy, rank, np.zeros(length, np.float32)) for rank in range(SIZE)]
        together(
            cupy,
            lambda rank: call(comms[rank], arrays[rank].data.ptr, targets[rank].data.ptr),
        )
        return [target.get().tolist() for target in targets]

    everything, total = np.concatenate(hosts).tolist(), np.sum(hosts, axis=0).tolist()
    gathered = results(lambda comm, a, b: comm.allGather(a, b, 6, FLOAT, 0), 18)
    assert gathered == [everything] * 3
    scattered = results(lambda comm, a, b: comm.reduceScatter(a, b, 2, FLOAT, SUM, 0), 2)
    assert scattered == [total[:2], total[2:4], total[4:]]
    sent = results(lambda comm, a, b: comm.broadcast(a, b, 6, FLOAT, 1, 0), 6)
    assert sent == [hosts[1].tolist()] * 3
    reduced = results(lambda comm, a, b: comm.reduce(a, b, 6, FLOAT, SUM, 2, 0), 6)
    assert reduced == [[0.0] * 6, [0.0] * 6, total]
    together(cupy, lambda rank: comms[rank].bcast(arrays[rank].data.ptr, 6, FLOAT, 2, 0))
    assert [array.get().tolist() for array in arrays] == [hosts[2].tolist()] * 3


def test_sums_are_not_in_the_order_of_ranks(cupy: Any, comms: list[Any]) -> None:
    hosts = [np.float32([1e8] * 3), np.float32([1.0] * 3), np.float32([-1e8] * 3)]
    arrays = [on(cupy, rank, host) for rank, host in enumerate(hosts)]
    reduce_all(cupy, comms, arrays)
    assert [array.get().tolist() for array in arrays] == [[0, 1, 0]] * 3


def test_no_rank_is_done_before_all_streams_have_come(cupy: Any, comms: list[Any]) -> None:
    driver.set_policy("newest")
    arrays = [on(cupy, rank, np.ones(2, np.float32)) for rank in range(SIZE)]
    driver.synchronize()
    ends = []
    for rank in range(SIZE):
        for _ in range(300):  # the driver runs something when it is asked for the 64th time
            assert not any(end.done for end in ends)
        at = arrays[rank].data.ptr
        comms[rank].allReduce(at, at, 2, FLOAT, SUM, 0)
        with cupy.cuda.Device(rank):
            ends.append(cupy.cuda.Stream.null.record())
    for end in ends:
        end.synchronize()
    assert [array.get().tolist() for array in arrays] == [[3, 3]] * 3


def test_collectives_of_a_group_do_not_see_each_others_results(cupy: Any, comms: list[Any]) -> None:
    arrays = [on(cupy, rank, np.ones(2, np.float32)) for rank in range(SIZE)]

    def call(rank: int) -> None:
        for _ in range(2):
            at = arrays[rank].data.ptr
            comms[rank].allReduce(at, at, 2, FLOAT, SUM, 0)

    together(cupy, call)
    assert [array.get().tolist() for array in arrays] == [[3, 3]] * 3


def test_a_result_that_another_stream_does_not_wait_for_is_not_there(
    cupy: Any, comms: list[Any]
) -> None:
    driver.set_policy("newest")
    arrays = [on(cupy, rank, np.ones(2, np.float32)) for rank in range(SIZE)]
    driver.synchronize()
    reduce_all(cupy, comms, arrays)
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as other:
        early = arrays[0] + 0
        assert early.get(stream=other).tolist() == [1, 1]
    assert arrays[0].get().tolist() == [3, 3]


@pytest.mark.parametrize("differs", ["count", "type", "operation", "number"])
def test_calls_that_do_not_match_are_reported(cupy: Any, comms: list[Any], differs: str) -> None:
    arrays = [on(cupy, rank, np.ones(4, np.float32)) for rank in range(SIZE)]

    def call(rank: int) -> None:
        is_odd = rank == 1
        count = 1 + is_odd if differs == "count" else 2
        dtype = 2 if differs == "type" and is_odd else FLOAT
        op = 2 if differs == "operation" and is_odd else SUM
        for _ in range(1 + (differs == "number" and is_odd)):
            at = arrays[rank].data.ptr
            comms[rank].allReduce(at, at, count, dtype, op, 0)

    together(cupy, call)
    words = "different numbers of calls" if differs == "number" else "make different calls"
    check_report(words, SIZE)


def refused(cupy: Any, call: Callable[[], None], words: str) -> None:
    with pytest.raises(cupy.cuda.nccl.NcclError):
        call()
    check_report(words)


def test_memory_that_is_no_ranks_is_refused(cupy: Any, comms: list[Any]) -> None:
    mine, others = (on(cupy, rank, np.ones(4, np.float32)) for rank in range(2))
    freed = on(cupy, 0, np.ones(4, np.float32)).data.ptr

    def call(at: int, count: int = 4) -> Callable[[], None]:
        return lambda: comms[0].allReduce(at, at, count, FLOAT, SUM, 0)

    refused(cupy, call(others.data.ptr), "is in another device's memory")
    refused(cupy, call(np.ones(4, np.float32).ctypes.data), "is in host memory")
    refused(cupy, call(freed), "is in memory that was freed")
    refused(cupy, call(mine.data.ptr, 10**9), "reaches beyond the end of its block")


def test_a_stream_of_another_device_is_refused(cupy: Any, comms: list[Any]) -> None:
    array = on(cupy, 0, np.ones(4, np.float32))
    at = array.data.ptr
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
    words = "the communicator is of gpu:0, the stream of gpu:1"
    refused(cupy, lambda: comms[0].allReduce(at, at, 4, FLOAT, SUM, stream.ptr), words)
    nccl = cupy.cuda.nccl
    with cupy.cuda.Device(0):
        mine = cupy.cuda.Stream(non_blocking=True)
    nccl.groupStart()
    comms[0].allReduce(at, at, 4, FLOAT, SUM, 0)
    refused(cupy, lambda: comms[0].allReduce(at, at, 4, FLOAT, SUM, mine.ptr), "on two streams")
    with pytest.raises(nccl.NcclError):
        nccl.groupEnd()


def test_two_ranks_of_a_device_and_groups_that_none_began_are_errors(cupy: Any) -> None:
    nccl = cupy.cuda.nccl
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.NcclCommunicator.initAll([0, 0])
    refused(cupy, nccl.groupEnd, "no group was started")


def test_a_collective_in_flight_must_be_aborted_and_is_then_no_result(
    cupy: Any, comms: list[Any]
) -> None:
    arrays = [on(cupy, rank, np.ones(1, np.uint8)) for rank in range(SIZE)]
    for rank in (0, 1):
        at = arrays[rank].data.ptr
        comms[rank].allReduce(at, at, 1, TYPES[np.uint8], SUM, 0)
    comms[0].abort()
    comms[1].destroy()
    assert [array.get().tolist() for array in arrays] == [[0xEE], [0xEE], [1]]
    check_report("a collective of rank 1 is still in flight")


def test_what_nobody_has_called_yet_is_named(cupy: Any, comms: list[Any]) -> None:
    with pytest.raises(KeyError):  # CuPy has no name for the error's number
        comms[0].send(0, 0, FLOAT, 1, 0)
    check_report("ncclSend is not there")
