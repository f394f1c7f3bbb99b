"""The stub driver sees the defects that it is for: each is planted here."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import driver
import numpy as np
import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.driver]

SCHEDULES = [("oldest", 0), ("newest", 0), *(("random", seed) for seed in range(8))]
_ADD = """
extern "C" __global__ void add(float* at, int size, float by) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) at[i] += by;
}
"""
_FAIL = """
extern "C" __global__ void fail(int* at) {
  if (threadIdx.x) return;
  __syncthreads();
  at[0] = 1;
}
"""


@pytest.fixture
def cupy() -> Iterator[Any]:
    import cupy

    yield cupy
    driver.set_policy("oldest")
    driver.repair()


@pytest.fixture
def add(cupy: Any) -> Callable[..., None]:
    """Adds a number to an array's elements, or to as many as are said."""
    kernel = cupy.RawKernel(_ADD, "add")

    def launch(array: Any, by: float = 1, size: int | None = None) -> None:
        size = array.size if size is None else size
        kernel((-(-size // 32),), (32,), (array, np.int32(size), np.float32(by)))

    return launch


def non_blocking(cupy: Any, device: int = 0) -> Any:
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def check_report(words: str) -> None:
    [report] = driver.take_reports()
    assert words in report


def error_of(cupy: Any, act: Callable[[], object]) -> str:
    errors = cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError
    with pytest.raises(errors) as caught:
        act()
    return str(caught.value)


# Memory


def test_host_code_cannot_read_the_memory_of_a_device() -> None:
    program = """
import ctypes, cupy
array = cupy.arange(5)
array.get()
ctypes.string_at(array.data.ptr, 1)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert finished.returncode < 0
    assert "Host code touched the memory of gpu:0" in finished.stderr


def test_new_memory_holds_nothing_useful(cupy: Any) -> None:
    assert (cupy.empty(7, np.uint8).get() == 0xEE).all()


def test_a_kernel_that_writes_behind_its_block_is_reported(cupy: Any, add: Any) -> None:
    array = cupy.zeros(37, np.float32)
    add(array)
    assert not driver.take_reports()
    add(array, size=38)
    check_report("behind the end of a block of 148 bytes")
    assert (array.get() == 2).all()


def test_a_freed_array_cannot_be_given_to_a_kernel(cupy: Any, add: Any) -> None:
    array = cupy.zeros(8, np.float32)
    view = cupy.ndarray(
        8, np.float32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(array.data.ptr, 32, None), 0)
    )
    add(view)
    del array
    assert "in memory that was freed" in error_of(cupy, lambda: add(view))


def test_memory_that_a_queued_kernel_writes_must_not_be_freed(cupy: Any, add: Any) -> None:
    driver.set_policy("oldest")
    mine, other = non_blocking(cupy), non_blocking(cupy)
    with mine:
        array = cupy.zeros(8, np.float32)
        mine.synchronize()
        with other:
            add(array)
            add(array)
        del array
    driver.set_policy("newest")  # runs everything that is queued, the oldest first
    assert not driver.take_reports()
    with mine:
        array = cupy.zeros(8, np.float32)
        mine.synchronize()
    with other:
        other.wait_event(mine.record())
        add(array, 1e30)
    del array  # goes back to `mine`, and is filled there before `other` comes to it
    check_report("freed memory was written")


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_a_queued_kernel_reads_must_not_be_freed(
    cupy: Any, add: Any, keeps: bool
) -> None:
    mine, other = non_blocking(cupy), non_blocking(cupy)
    copy = cupy.zeros(8, np.float32)
    kept = []

    def run() -> bool:
        with mine:
            array = cupy.full(8, 5, np.float32)
        driver.synchronize()
        with other:
            copy.data.copy_from_device_async(array.data, array.nbytes, other)
        if keeps:
            kept.append(array)
        del array  # goes back to `mine`, and is filled there
        return bool((copy.get(stream=other) == 5).all())

    assert finds_a_race(run) == (not keeps)


def test_memory_in_a_cycle_of_references_is_freed(cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    cycle: list[Any] = [cupy.zeros(1000).data.mem]
    cycle.append(cycle)
    assert pool.used_bytes() > before
    del cycle
    gc.collect()
    assert pool.used_bytes() == before


def test_a_block_that_the_pool_has_given_back_is_gone(cupy: Any) -> None:
    # Its own: what earlier tests have left may share a block of the default pool's.
    pool = cupy.cuda.MemoryPool()
    address = pool.malloc(400_000).ptr
    pool.free_all_blocks()
    words = error_of(cupy, lambda: cupy.cuda.runtime.memset(address, 0, 4))
    assert "cudaErrorInvalidValue" in words
    assert "is in no block of device memory" in words
    words = error_of(cupy, lambda: cupy.cuda.runtime.free(address))
    assert "where no block begins" in words


def test_a_copy_must_stay_inside_its_block(cupy: Any) -> None:
    at = cupy.cuda.runtime.malloc(100)
    assert "reaches beyond the end" in error_of(cupy, lambda: cupy.cuda.runtime.memset(at, 0, 101))
    cupy.cuda.runtime.free(at)


def test_a_copy_says_truly_where_its_memory_is(cupy: Any) -> None:
    array, host = cupy.zeros(8, np.uint8), np.zeros(8, np.uint8)
    runtime = cupy.cuda.runtime
    words = error_of(
        cupy,
        lambda: runtime.memcpy(array.data.ptr, host.ctypes.data, 8, runtime.memcpyDeviceToDevice),
    )
    assert "from host to device, and the call says device to device" in words


def test_host_memory_cannot_be_given_to_a_kernel(cupy: Any, add: Any) -> None:
    host = np.zeros(8, np.float32)
    kernel = cupy.RawKernel(_ADD, "add")
    arguments = (np.uint64(host.ctypes.data), np.int32(8), np.float32(1))
    assert "is in host memory" in error_of(cupy, lambda: kernel((1,), (32,), arguments))


@pytest.mark.gpus(2)
def test_memory_of_another_device_needs_peer_access(cupy: Any, add: Any) -> None:
    program = f"""
import cupy, numpy as np
with cupy.cuda.Device(1):
    array = cupy.zeros(8, np.float32)
    cupy.cuda.Device(1).synchronize()
kernel = cupy.RawKernel('''{_ADD}''', "add")
def launch():
    kernel((1,), (32,), (np.uint64(array.data.ptr), np.int32(8), np.float32(1)))
    cupy.cuda.Device(0).synchronize()
try:
    launch()
except cupy.cuda.runtime.CUDARuntimeError as error:
    print(error)
import driver
driver.repair()
cupy.cuda.runtime.deviceEnablePeerAccess(1)
launch()
print(array.get())
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    first, second = finished.stdout.splitlines()
    assert "cudaErrorIllegalAddress" in first
    assert "which gpu:0 cannot" in first
    assert second == "[1. 1. 1. 1. 1. 1. 1. 1.]"


def test_a_library_is_not_given_freed_memory(cupy: Any) -> None:
    from cupy_backends.cuda.libs import cublas

    matrix = cupy.ones((4, 4), np.float32)
    assert (matrix @ matrix).get().tolist() == [[4] * 4] * 4
    gone = cupy.ones((4, 4), np.float32)
    address = gone.data.ptr
    del gone
    with pytest.raises(cublas.CUBLASError):
        cublas.sgemm(
            *(cupy.cuda.get_cublas_handle(), 0, 0, 4, 4, 4, np.ones(1, np.float32).ctypes.data),
            *(address, 4, matrix.data.ptr, 4, np.zeros(1, np.float32).ctypes.data),
            *(matrix.data.ptr, 4),
        )
    check_report("is in memory that was freed")


# Kernels that fail


def test_after_a_kernel_has_failed_every_call_names_it(cupy: Any) -> None:
    array = cupy.zeros(1, np.int32)
    kernel = cupy.RawKernel(_FAIL, "fail")
    kernel((1,), (32,), (array,))
    for _ in range(2):
        words = error_of(cupy, lambda: cupy.cuda.Device(0).synchronize())
        assert "cudaErrorLaunchFailure: kernel fail: block 0, thread 0" in words
    driver.repair()
    assert array.get() == 0


# Streams and devices


@pytest.mark.gpus(2)
def test_a_kernel_runs_on_a_stream_of_the_current_device(cupy: Any, add: Any) -> None:
    array = cupy.zeros(8, np.float32)
    kernel = cupy.RawKernel(_ADD, "add")
    add(array)
    arguments = array, np.int32(8), np.float32(1)
    # CuPy itself refuses to make it the current stream.
    stream = non_blocking(cupy, 1)
    words = error_of(cupy, lambda: kernel((1,), (32,), arguments, stream=stream))
    assert "cudaErrorInvalidResourceHandle" in words
    assert "gpu:0 is the current device, and the stream is one of gpu:1" in words


@pytest.mark.gpus(2)
def test_an_event_is_recorded_on_its_own_device(cupy: Any) -> None:
    event = cupy.cuda.Event()
    words = error_of(cupy, lambda: event.record(non_blocking(cupy, 1)))
    assert "an event of gpu:0 cannot be recorded on a stream of gpu:1" in words


def test_a_destroyed_stream_is_none(cupy: Any, add: Any) -> None:
    stream = non_blocking(cupy)
    handle = stream.ptr
    del stream
    words = error_of(cupy, lambda: cupy.cuda.runtime.streamSynchronize(handle))
    assert "is no stream, or was destroyed" in words


def finds_a_race(run: Callable[[], bool]) -> bool:
    """Says whether a program goes wrong under one of the schedules."""
    wrong = []
    for policy, seed in SCHEDULES:
        driver.set_policy(policy, seed)
        wrong.append(not run())
    return any(wrong)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait_for_another_is_found(cupy: Any, add: Any, waits: bool) -> None:
    first, second = non_blocking(cupy), non_blocking(cupy)
    array = cupy.zeros(8, np.float32)
    copy = cupy.zeros(8, np.float32)

    def run() -> bool:
        array.fill(0)
        driver.synchronize()
        with first:
            add(array, 5)
        if waits:
            second.wait_event(first.record())
        with second:
            copy.data.copy_from_device_async(array.data, array.nbytes, second)
        return bool((copy.get(stream=second) == 5).all())

    assert finds_a_race(run) == (not waits)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_the_legacy_stream_waits_for_blocking_streams_alone(
    cupy: Any, add: Any, is_blocking: bool
) -> None:
    stream = cupy.cuda.Stream(non_blocking=not is_blocking)
    array = cupy.zeros(8, np.float32)

    def run() -> bool:
        array.fill(0)
        driver.synchronize()
        with stream:
            add(array, 5)
        array_on_default_stream = array * 2
        return bool((array_on_default_stream.get() == 10).all())

    assert finds_a_race(run) == (not is_blocking)


def test_waiting_for_an_event_means_its_last_record_so_far(cupy: Any, add: Any) -> None:
    first, second = non_blocking(cupy), non_blocking(cupy)
    array, copy = cupy.zeros(8, np.float32), cupy.zeros(8, np.float32)
    event = cupy.cuda.Event(disable_timing=True)

    def run(again: bool) -> bool:
        array.fill(0)
        driver.synchronize()
        event.record(first)
        with first:
            add(array, 5)
        if again:
            event.record(first)
        second.wait_event(event)
        event.record(first)
        copy.data.copy_from_device_async(array.data, array.nbytes, second)
        return bool((copy.get(stream=second) == 5).all())

    assert not finds_a_race(lambda: run(again=True))
    assert finds_a_race(lambda: run(again=False))


def test_nothing_runs_before_the_host_waits_and_everything_may_be_asked_for(
    cupy: Any, add: Any
) -> None:
    array = cupy.zeros(8, np.float32)
    driver.set_policy("oldest")
    add(array)
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    assert not event.done
    while not event.done:  # it will be, some time
        pass


def test_who_has_waited_for_a_device_may_ask_as_often_as_before(cupy: Any, add: Any) -> None:
    array = cupy.zeros(8, np.float32)
    driver.set_policy("oldest")
    for _ in range(5):
        cupy.cuda.Device(0).synchronize()
        add(array)
        event = cupy.cuda.Event(disable_timing=True)
        event.record()
        assert not any(event.done for _ in range(40))


def test_a_copy_from_pageable_memory_is_made_at_once(cupy: Any) -> None:
    driver.set_policy("newest")
    host = np.arange(8)
    array = cupy.empty(8, host.dtype)
    array.data.copy_from_host_async(host.ctypes.data, host.nbytes)
    host[:] = 0
    assert (array.get() == np.arange(8)).all()


@pytest.mark.parametrize("is_upload", [True, False])
def test_page_locked_memory_that_is_used_again_too_early_is_reported(
    cupy: Any, is_upload: bool
) -> None:
    driver.set_policy("oldest")
    memory = cupy.cuda.alloc_pinned_memory(64)
    host = np.frombuffer(memory, np.uint8, 64)
    array = cupy.zeros(64, np.uint8)
    copy = array.data.copy_from_host_async if is_upload else array.data.copy_to_host_async
    copy(host.ctypes.data, 64, cupy.cuda.get_current_stream())
    driver.synchronize()
    assert not driver.take_reports()
    copy(host.ctypes.data, 64, cupy.cuda.get_current_stream())
    host[:] = 3
    check_report(f"was written before a queued cudaMemcpyAsync {('wrote to', 'read')[is_upload]}")


def test_what_a_program_may_rely_on_is_known(cupy: Any, add: Any) -> None:
    driver.set_policy("oldest")
    first, second, blocking = non_blocking(cupy), non_blocking(cupy), cupy.cuda.Stream()
    array = cupy.zeros(8, np.float32)
    with first:
        add(array)
    done = driver.mark(0, first.ptr)
    assert driver.precedes(done, 0, first.ptr)
    assert not driver.precedes(done, 0, second.ptr)
    second.wait_event(first.record())
    assert driver.precedes(done, 0, second.ptr)
    assert not driver.precedes(done, 0, 0)
    with blocking:
        add(array)
    done = driver.mark(0, blocking.ptr)
    assert driver.precedes(done, 0, 0)
    assert not driver.precedes(done, 0, first.ptr)
    assert not driver.precedes(done, 1, 0)
    blocking.synchronize()
    assert driver.precedes(done, 1, 0)


# Streams that are destroyed


def test_streams_that_are_gone_cost_nothing_later(cupy: Any, add: Any) -> None:
    """However much they have waited for, and although memory and events of theirs outlive them."""
    driver.set_policy("random")
    array, kept = cupy.zeros(8, np.float32), []

    def use_streams() -> int:
        for _ in range(20):
            stream, other = non_blocking(cupy), cupy.cuda.Stream()
            with stream:
                kept.append((cupy.zeros(8, np.float32), stream.record()))
            other.wait_event(kept[-1][1])
            with other:
                add(array)
        del stream, other
        driver.synchronize()
        for _, event in kept:
            cupy.cuda.get_current_stream().wait_event(event)
        kept.clear()
        driver.synchronize()
        return driver.num_remembered()

    assert use_streams() == use_streams() == use_streams()


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_is_gone_before_its_work_is_done_is_waited_for_or_found(
    cupy: Any, add: Any, waits: bool
) -> None:
    array, copy = cupy.zeros(8, np.float32), cupy.zeros(8, np.float32)

    def run() -> bool:
        array.fill(0)
        driver.synchronize()
        first = non_blocking(cupy)
        with first:
            add(array, 5)
        done = first.record()
        del first
        second = non_blocking(cupy)
        if waits:
            second.wait_event(done)
        copy.data.copy_from_device_async(array.data, array.nbytes, second)
        return bool((copy.get(stream=second) == 5).all())

    assert finds_a_race(run) == (not waits)


def test_memory_of_a_stream_that_is_gone_belongs_to_the_next_with_its_handle(
    cupy: Any, add: Any
) -> None:
    def run() -> bool:
        stream = non_blocking(cupy)
        with stream:
            array = cupy.zeros(8, np.float32)
        stream.synchronize()
        handle, address = stream.ptr, array.data.ptr
        del stream
        heir = non_blocking(cupy)
        assert heir.ptr == handle
        with heir:
            del array  # is filled before its memory is used again
            again = cupy.ones(8, np.float32)
            assert again.data.ptr == address
            add(again)
        return bool((again.get(stream=heir) == 2).all()) and not driver.take_reports()

    assert not finds_a_race(run)


def test_who_gets_a_handle_by_luck_may_not_rely_on_what_was_done_under_it(
    cupy: Any, add: Any
) -> None:
    driver.set_policy("oldest")
    array, other = cupy.zeros(8, np.float32), non_blocking(cupy)
    stream = non_blocking(cupy)
    with stream:
        add(array)
    done, event, handle = driver.mark(0, stream.ptr), stream.record(), stream.ptr
    del stream
    other.record().synchronize()  # which happens to come after all that is older
    heir, third = non_blocking(cupy), non_blocking(cupy)
    assert heir.ptr == handle
    with heir:
        add(array)
    assert not driver.precedes(done, 0, heir.ptr)
    third.wait_event(event)
    assert driver.precedes(done, 0, third.ptr)
    assert not driver.precedes(driver.mark(0, heir.ptr), 0, third.ptr)
    event.synchronize()
    assert driver.precedes(done, 0, heir.ptr)
    assert not driver.precedes(driver.mark(0, heir.ptr), 0, third.ptr)


# Devices together


@pytest.mark.gpus(2)
def test_arrays_are_copied_between_devices(cupy: Any) -> None:
    with cupy.cuda.Device(1):
        there = cupy.arange(10)
    here = cupy.empty(10, there.dtype)
    here.data.copy_from_device_async(there.data, there.nbytes, cupy.cuda.get_current_stream())
    runtime = cupy.cuda.runtime
    runtime.memcpyPeer(here.data.ptr, 0, there.data.ptr, 1, there.nbytes)
    assert (here.get() == np.arange(10)).all()
    words = error_of(
        cupy, lambda: runtime.memcpyPeer(here.data.ptr, 1, there.data.ptr, 0, there.nbytes)
    )
    assert "the memory is that of gpu:1 and gpu:0" in words


# Graphs


def test_a_graph_runs_as_often_as_it_is_launched(cupy: Any, add: Any) -> None:
    first, second = non_blocking(cupy), non_blocking(cupy)
    array, other = cupy.zeros(8, np.float32), cupy.zeros(8, np.float32)
    driver.synchronize()
    with first:
        first.begin_capture()
        add(array, 1)
        forked = cupy.cuda.Event(disable_timing=True)
        forked.record(first)
        second.wait_event(forked)
        with second:
            add(other, 3)
            joined = cupy.cuda.Event(disable_timing=True)
            joined.record(second)
        add(array, 1)
        first.wait_event(joined)
        other.data.copy_from_device_async(array.data, 4, first)
        graph = first.end_capture()
        assert (array.get() == 0).all()
        for _ in range(3):
            graph.launch(first)
        assert (array.get() == 6).all()
        assert other.get().tolist() == [6] + 7 * [9]


def test_memory_may_be_freed_during_a_capture(cupy: Any, add: Any) -> None:
    stream = non_blocking(cupy)
    with stream:
        array = cupy.zeros(8, np.float32)
        add(array)
        stream.synchronize()
        stream.begin_capture()
        del array  # as by the garbage collection
        stream.end_capture()
        assert not driver.take_reports()
        add(cupy.zeros(8, np.float32))
        stream.synchronize()
    assert not driver.take_reports()


def captured(cupy: Any, act: Callable[[Any], object], mode: int = 0) -> tuple[str, str]:
    """Returns the error of a call during a capture, and that of the capture's end."""
    stream = cupy.cuda.Stream()
    with stream:
        stream.begin_capture(mode)
        during = error_of(cupy, lambda: act(stream))
        after = error_of(cupy, stream.end_capture)
    return during.split(":")[0], after.split(":")[0]


def test_what_a_capture_forbids_is_an_error_and_ends_it(cupy: Any, add: Any) -> None:
    array, host = cupy.zeros(8, np.float32), np.zeros(8, np.float32)
    runtime = cupy.cuda.runtime
    unsupported = "cudaErrorStreamCaptureUnsupported", "cudaErrorStreamCaptureInvalidated"
    assert captured(cupy, lambda stream: stream.synchronize()) == unsupported
    assert captured(cupy, lambda stream: runtime.malloc(100)) == unsupported
    assert (
        captured(
            cupy,
            lambda stream: runtime.memcpyAsync(
                array.data.ptr, host.ctypes.data, 32, runtime.memcpyHostToDevice, stream.ptr
            ),
        )
        == unsupported
    )
    implicit = "cudaErrorStreamCaptureImplicit", "cudaErrorStreamCaptureInvalidated"
    assert captured(cupy, lambda stream: runtime.memsetAsync(array.data.ptr, 0, 4, 0)) == implicit


def test_an_event_of_a_capture_cannot_be_asked(cupy: Any) -> None:
    stream = non_blocking(cupy)
    with stream:
        stream.begin_capture()
        event = stream.record()
        assert "cudaErrorCapturedEvent" in error_of(cupy, event.synchronize)
        stream.end_capture()


def test_a_stream_that_joins_a_capture_must_be_joined_back(cupy: Any, add: Any) -> None:
    first, second = non_blocking(cupy), non_blocking(cupy)
    array = cupy.zeros(8, np.float32)
    with first:
        first.begin_capture()
        second.wait_event(first.record())
        with second:
            add(array)
        assert "cudaErrorStreamCaptureUnjoined" in error_of(cupy, first.end_capture)


# What it tells


def test_launches_and_copies_are_listed(cupy: Any, add: Any) -> None:
    array = cupy.zeros(64, np.float32)
    stream = non_blocking(cupy)
    with driver.record_launches() as launches, stream:
        add(array)
        array.get()
    kernel, copy = launches
    assert (kernel.kind, kernel.name, kernel.grid, kernel.block) == (
        *("kernel", "add", (2, 1, 1), (32, 1, 1)),
    )
    assert (kernel.shared_bytes, kernel.device) == (0, 0)
    address, size, by = kernel.arguments
    assert int.from_bytes(address, "little") == array.data.ptr
    assert (size, by) == (np.int32(64).tobytes(), np.float32(1).tobytes())
    assert (copy.kind, copy.num_bytes, copy.arguments) == ("device to host", 256, ())
    assert kernel.stream == copy.stream == stream.ptr


def test_calls_are_counted(cupy: Any, add: Any) -> None:
    array = cupy.zeros(8, np.float32)
    before = driver.counts()
    add(array)
    array.get()
    after = driver.counts()
    for name, count in {"launches": 1, "device to host bytes": 32, "cudaMemcpyAsync": 1}.items():
        assert after[name] - before.get(name, 0) == count


def test_a_function_that_is_not_there_is_named(cupy: Any) -> None:
    words = error_of(cupy, lambda: cupy.cuda.runtime.mallocManaged(100))
    assert "cudaErrorNotSupported: this driver has no cudaMallocManaged" in words


def test_random_numbers_are_refused_by_name(cupy: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"no cupy\.random\.default_rng"):
        cupy.random.default_rng(1)
    with pytest.raises(NotImplementedError, match=r"no cupy\.random\.seed"):
        from cupy.random import seed  # noqa: F401
