"""The launcher's copies and events, on streams that run only when somebody waits for them."""

from __future__ import annotations

import ctypes
import gc
import importlib
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import planted

from gpuopt import DeadlineExceededError, locks
from gpuopt.backends.cuda import page_locked
from gpuopt.backends.cuda.launcher import wait_for_event

# What the real module is called with, of CuPy 14.2's cupy/cuda/{memory,pinned_memory,stream}.pyx.


class Stream:
    """A stream that does its work only when somebody waits for an event on it."""

    def __init__(self, device: int, ptr: int) -> None:
        self.device, self.ptr = device, ptr
        self.queue: list[Callable[[], None]] = []

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.synchronize)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing
        self.ptr = self
        self.device = current.device
        self.stream: Stream | None = None
        self.is_over = True

    def record(self, stream: Stream) -> None:
        assert stream.device == self.device, "an event is recorded on its own device"
        self.stream, self.is_over = stream, False
        stream.queue.append(lambda: setattr(self, "is_over", True))

    def synchronize(self) -> None:
        while not self.is_over:
            assert self.stream is not None
            self.stream.queue.pop(0)()


class CUDARuntimeError(RuntimeError):
    pass


def query(event: Event) -> int:
    return current.status or (0 if event.is_over else 600)


def check_status(status: int) -> None:
    if status:
        raise CUDARuntimeError(status)


class MemoryPointer:
    def __init__(self, address: int) -> None:
        self.ptr = address

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.ptr + offset)

    def copy_from_host_async(self, mem: int, size: int, stream: Stream) -> None:
        stream.queue.append(lambda: ctypes.memmove(self.ptr, mem, size))

    def copy_to_host_async(self, mem: int, size: int, stream: Stream) -> None:
        stream.queue.append(lambda: ctypes.memmove(mem, self.ptr, size))


class DeviceArray:
    """An array of a device whose memory is host memory."""

    def __init__(self, host: np.ndarray, device: int = 0) -> None:
        self.host = host
        self.dtype, self.nbytes, self.size = host.dtype, host.nbytes, host.size
        self.data = MemoryPointer(host.ctypes.data)
        self.device = Device(device)
        self._c_contiguous = host.flags.c_contiguous

    def copy(self) -> DeviceArray:
        """To the current device, on its current stream; contiguous on the original's, first."""
        source = self.host
        if not self._c_contiguous and self.device.id != current.device:
            source = np.full(self.host.shape, 99, self.dtype)
            with self.device:
                current_stream().queue.append(lambda: np.copyto(source, self.host))
        made = DeviceArray(np.full(self.host.shape, 99, self.dtype), current.device)
        current_stream().queue.append(lambda: np.copyto(made.host, source))
        return made


class PinnedMemory(bytearray):
    """cupy.cuda.PinnedMemoryPointer lends its buffer, and has `size()`."""

    made = 0

    def size(self) -> int:
        return len(self)


class Device:
    def __init__(self, index: int) -> None:
        self.id = index
        self.attributes = {"MultiProcessorCount": 7, "L2CacheSize": 2**20}

    def __enter__(self) -> None:
        self.outer, current.device = current.device, self.id

    def __exit__(self, *raised: object) -> None:
        current.device = self.outer


current = SimpleNamespace(device=0, streams={}, status=0, launch=None)


def current_stream() -> Stream:
    found: Stream = current.streams.setdefault(current.device, Stream(current.device, 0))
    return found


def alloc_pinned_memory(size: int) -> PinnedMemory:
    PinnedMemory.made += 1
    return PinnedMemory(size)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """cupy_launcher with this file for CuPy."""
    cupy = ModuleType("cupy")
    cupy.ndarray = DeviceArray  # type: ignore[attr-defined]
    cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Event=Event,
        Stream=SimpleNamespace(null=SimpleNamespace(ptr=0), ptds=SimpleNamespace(ptr=2)),
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=current_stream,
        runtime=SimpleNamespace(
            memGetInfo=lambda: (0, 0), eventQuery=query, check_status=check_status
        ),
        driver=SimpleNamespace(launchKernel=lambda *given: current.launch(*given)),
    )
    name = "gpuopt.backends.cuda.cupy_launcher"
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, name, raising=False)
    current.device, current.streams, current.status = 0, {}, 0
    PinnedMemory.made = 0
    imported = importlib.import_module(name)
    monkeypatch.setattr(page_locked, "wait_for_event", lambda event, what: event.synchronize())
    yield imported
    sys.modules.pop(name, None)


@pytest.mark.parametrize("dtype", [np.int64, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_an_upload_is_done_with_the_host_array_when_it_returns(
    module: Any, dtype: Any, shape: tuple[int, ...]
) -> None:
    launcher = module.CupyLauncher(0)
    source = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) + dtype(1)
    source = np.asarray(source, dtype)
    expected = source.copy()
    target = DeviceArray(np.zeros(shape, dtype))
    launcher.upload(target, source)
    source[...] = 0
    assert not target.host.any()
    current_stream().run()
    assert target.host.tobytes() == expected.tobytes()


def test_uploads_do_not_overwrite_what_has_not_been_copied_yet(module: Any) -> None:
    launcher = module.CupyLauncher(0)
    targets = [DeviceArray(np.zeros(3, np.int64)) for _ in range(1000)]
    for number, target in enumerate(targets):
        launcher.upload(target, np.full(3, number))
        if number == 99:
            current_stream().run()
    # Far ahead of the GPU, the host waits instead of allocating page-locked memory.
    assert PinnedMemory.made == 1
    assert current_stream().queue
    current_stream().run()
    assert [int(target.host[2]) for target in targets] == list(range(1000))


@pytest.mark.parametrize("largest", [4096, 65536, 2**20])
def test_a_large_upload_goes_in_pieces_and_waits_for_memory(
    module: Any, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(module, "_LARGEST_COPY", largest)
    launcher = module.CupyLauncher(0)
    source = np.arange(6 * 2**18 + 1, dtype=np.float32)
    target = DeviceArray(np.zeros_like(source))
    launcher.upload(target, source[::-1])
    launcher.upload(target, source[::-1])
    assert PinnedMemory.made <= 5
    current_stream().run()
    assert np.array_equal(target.host, source[::-1])


def test_an_upload_waits_for_memory_no_longer_than_the_deadline(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked, "wait_for_event", wait_for_event)
    monkeypatch.setattr(locks, "DEADLINE_S", 0.05)
    launcher = module.CupyLauncher(0)
    target = DeviceArray(np.zeros(3, np.int64))
    for _ in range(256):
        launcher.upload(target, np.arange(3))
    with pytest.raises(DeadlineExceededError, match="gpu:0, which reads what was uploaded"):
        launcher.upload(target, np.arange(3))
    current_stream().run()
    launcher.upload(target, np.arange(3))
    current_stream().run()
    assert target.host.tolist() == [0, 1, 2]


def test_what_an_interrupted_upload_reads_is_not_overwritten(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = module.CupyLauncher(0)
    interrupted, *others = [DeviceArray(np.zeros(3, np.int64)) for _ in range(400)]
    with monkeypatch.context() as signal, suppress(KeyboardInterrupt):
        signal.setattr(Event, "record", raise_interrupt)
        launcher.upload(interrupted, np.arange(3))
    for target in others:
        launcher.upload(target, np.array([7, 8, 9]))
    current_stream().run()
    assert interrupted.host.tolist() == [0, 1, 2]
    assert all(target.host.tolist() == [7, 8, 9] for target in others)


def test_where_an_interrupted_download_lands_nothing_else_does(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = module.CupyLauncher(0)
    interrupted, other = (DeviceArray(np.array([number], np.uint64)) for number in (13, 5))
    with monkeypatch.context() as signal, suppress(KeyboardInterrupt):
        signal.setattr(Event, "record", raise_interrupt)
        launcher.download(interrupted)
    late = current.streams.pop(0)
    landed = [launcher.download(other) for _ in range(150)]
    current_stream().run()
    late.run()
    assert all(download.values.tolist() == [5] for download in landed)


def raise_interrupt(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_wait_ends_at_once_with_an_error_of_cuda(module: Any) -> None:
    event = module.CupyLauncher(0).record()
    current.status = 700
    with pytest.raises(CUDARuntimeError, match="700"):
        wait_for_event(event, "a GPU that has failed")


def test_an_upload_of_another_size_or_type_is_refused(module: Any) -> None:
    launcher = module.CupyLauncher(0)
    target = DeviceArray(np.zeros(3, np.int64))
    for source in (np.zeros(4, np.int64), np.zeros(3, np.uint64), np.zeros(6, np.float32)):
        with pytest.raises(TypeError, match="cannot upload"):
            launcher.upload(target, source)


def test_a_download_is_there_when_its_event_is_done(module: Any) -> None:
    launcher = module.CupyLauncher(0)
    source = DeviceArray(np.array([1, 2], np.uint64))
    download = launcher.download(source)
    assert not download.event.done
    source.host[1] = 5
    download.event.synchronize()
    assert download.values.tolist() == [1, 5]


def test_a_download_keeps_its_memory_until_it_has_landed_and_is_gone(module: Any) -> None:
    launcher = module.CupyLauncher(0)
    source = DeviceArray(np.array([1, 2], np.uint64))
    kept = launcher.download(source)
    for _ in range(1000):
        launcher.download(source)  # gone while the copy is in flight
    assert PinnedMemory.made == 1
    many = [launcher.download(source) for _ in range(150)]
    assert PinnedMemory.made == 2
    source.host[:] = 7
    current_stream().run()
    assert {tuple(each.values.tolist()) for each in many} == {(7, 7)}
    assert kept.values.tolist() == [1, 2]


def test_a_download_in_a_reference_cycle_ends_no_event(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Event, "__del__", lambda event: ended.append(id(event)), raising=False)
    launcher = module.CupyLauncher(0)
    cycle: list[Any] = [launcher.download(DeviceArray(np.array([1, 2], np.uint64)))]
    current_stream().run()
    event = id(cycle[0].event)
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert event not in ended


@pytest.mark.parametrize("first", ["here", "there"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), "transposed"])
def test_a_copy_from_a_peer_waits_for_it_and_is_waited_for(
    module: Any, first: str, shape: Any
) -> None:
    launcher = module.CupyLauncher(1)
    host = np.zeros((2, 3)).T if shape == "transposed" else np.zeros(shape)
    array = DeviceArray(host, device=0)
    here, there = current.streams.setdefault(1, Stream(1, 0)), current_stream()
    there.queue.append(lambda: array.host.fill(4))  # before the copy
    with launcher.device():
        copy = launcher.copy_of_peer(array)
    there.queue.append(lambda: array.host.fill(9))  # as if it were freed and used again
    for stream in (here, there) if first == "here" else (there, here):
        stream.run()
    assert copy.host.tolist() == np.full(host.shape, 4).tolist()
    assert copy.device.id == 1


def test_each_thread_has_a_stream_of_its_own_under_ptds(module: Any) -> None:
    launcher = module.CupyLauncher(0)
    assert launcher.is_default_stream()
    seen = [launcher.stream()]
    assert launcher.stream() == seen[0]
    current.streams[0] = Stream(0, 2)
    assert not launcher.is_default_stream()

    def see() -> None:
        seen.append(launcher.stream())
        assert launcher.stream() == seen[-1]

    see()
    # One after the other: Python gives them the same id.
    for _ in range(3):
        thread = threading.Thread(target=see)
        thread.start()
        thread.join()
    assert len(set(seen)) == len(seen) == 5


def test_addresses_of_many_arrays_are_read_in_order(module: Any) -> None:
    launcher = module.CupyLauncher(1)
    arrays = [SimpleNamespace(data=SimpleNamespace(ptr=p, device_id=d), _c_contiguous=c)
              for p, d, c in ((7, 1, True), (9, 1, False), (2**40, 1, True))]  # fmt: skip
    assert launcher.addresses(arrays).tolist() == [7, 9, 2**40]
    assert launcher.strided(arrays) == [1]
    assert launcher.owns(arrays)
    arrays[2].data.device_id = 0
    assert not launcher.owns(arrays)
    assert launcher.num_multiprocessors == 7


FUNCTION = 2**40 + 8
COMPILED = SimpleNamespace(kernel=SimpleNamespace(ptr=FUNCTION))


def bytes_of_arguments(address: int, sizes: Sequence[int]) -> list[bytes]:
    """What `cuLaunchKernel` reads: the address of each argument is in a list."""
    pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
    return [ctypes.string_at(at or 0, size) for at, size in zip(pointers, sizes, strict=True)]


def test_arguments_reach_the_driver_in_the_order_of_cxx(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load", lambda kernel: COMPILED)
    current.streams[0] = Stream(0, 5)
    launched = []

    def launch(*given: Any) -> None:
        launched.append((given, bytes_of_arguments(given[-2], [24, 8, 8, 8, 4, 8])))

    monkeypatch.setattr(current, "launch", launch)
    left, right, before, after, results = (DeviceArray(np.zeros(4, np.float32)) for _ in range(5))
    module.CupyLauncher(0).launch(
        planted.combine(),
        3,
        64,
        after_factor=2**40,
        before_factor=-5,
        results=results,
        after=after,
        before=before,
        pair=planted.Pair(left, right, 7, -1),
    )
    [((function, *shape, shared_bytes, stream, _, extra), (pair, *others))] = launched
    assert (function, shape, shared_bytes) == (FUNCTION, [3, 1, 1, 64, 1, 1], 0)
    assert (stream, extra) == (5, 0)
    assert pair == struct.pack("=QQii", left.data.ptr, right.data.ptr, 7, -1)
    pointers = [struct.pack("=Q", array.data.ptr) for array in (before, after, results)]
    assert others == [*pointers, struct.pack("=i", -5), struct.pack("=q", 2**40)]


def test_each_thread_that_launches_gets_the_devices_context_once(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load", lambda kernel: COMPILED)
    calls: list[str] = []
    monkeypatch.setattr(current, "launch", lambda *given: calls.append("launch"))
    module.cupy.cuda.runtime.memGetInfo = lambda: calls.append("context")
    launcher = module.CupyLauncher(0)
    values = DeviceArray(np.zeros(4, np.float32))
    launch = launcher.bind(planted.planted_kernel("deadlock", False), 1, 32, values=values, size=4)

    def start_twice() -> None:
        launch.start()
        launch.start()

    for _ in range(2):
        thread = threading.Thread(target=start_twice)
        thread.start()
        thread.join()
    assert calls == ["context", "launch", "launch"] * 2


def test_an_array_that_is_forgotten_leaves_a_null_pointer(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load", lambda kernel: COMPILED)
    launched = []

    def launch(*given: Any) -> None:
        launched.append(bytes_of_arguments(given[-2], [8, 8]))

    monkeypatch.setattr(current, "launch", launch)
    values, others = (DeviceArray(np.zeros(4, np.float32)) for _ in range(2))
    kernel = planted.planted_kernel("deadlock", False)
    prepared = module.CupyLauncher(0).bind(kernel, 1, 32, values=values, size=4)
    is_gone = weakref.ref(values)
    prepared.start()
    prepared.forget("values")
    address = values.data.ptr
    del values
    gc.collect()
    assert is_gone() is None
    prepared.start()
    prepared.replace(values=others)
    prepared.start()
    expected = [struct.pack("=QQ", at, 4) for at in (address, 0, others.data.ptr)]
    assert [b"".join(arguments) for arguments in launched] == expected


def test_a_wrong_argument_does_not_reach_cupy(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", None)
    arrays = {name: DeviceArray(np.zeros(4, np.float32)) for name in ("before", "after", "results")}
    factors = {"before_factor": 1, "after_factor": 1}
    for pair, message in [
        (planted.Pair(np.zeros(4, np.float32), None, 1, 1), "pair.left must be .* of numpy"),
        (planted.Pair(arrays["after"], None, 1, 1), "pair.right must be .*got None"),
    ]:
        with pytest.raises(TypeError, match=message):
            module.CupyLauncher(0).launch(planted.combine(), 1, 32, pair=pair, **arrays, **factors)
