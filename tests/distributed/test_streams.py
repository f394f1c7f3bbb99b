"""What ranks on GPUs write after a collective comes after what the others have read in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
from emulator import EmulatorLauncher

from gpuopt import IndexedSlices, backends
from gpuopt.backends.cuda.backend import CudaBackend
from gpuopt.device import Device
from gpuopt.distributed import Communicator, ThreadGroup
from gpuopt.distributed.first_rank import call_in_first_rank

# ("read" or "record", a stream), or ("wait", a stream, the stream whose record it waits for).
Log = list[tuple[Any, ...]]

GPU = Device("gpu", 0)


class LoggingLauncher(EmulatorLauncher):
    def __init__(self, log: Log) -> None:
        super().__init__(xp=fake_cupy)
        self._log = log

    def record(self, event: Any = None) -> Any:
        self._log.append(("record", self.stream()))
        return super().record(event)

    def wait(self, event: Any) -> None:
        self._log.append(("wait", self.stream(), event.stream))
        super().wait(event)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Makes gpu:0 usable, for all but kernels, and lists the streams' operations in order."""
    log: Log = []
    for owner, name in ((fake_cupy, "concatenate"), (fake_cupy.ndarray, "__setitem__")):
        original = getattr(owner, name)

        def reads(*arguments: Any, original: Any = original) -> Any:
            log.append(("read", fake_cupy.cuda.current.stream))
            return original(*arguments)

        monkeypatch.setattr(owner, name, reads)
    with backends.using(GPU, CudaBackend(GPU, LoggingLauncher(log))):
        yield log


def waits_for_reads(log: Log, writer: int, reader: int) -> bool:
    """Whether the writer's stream waits for a record that follows the reader's last read."""
    last_read = max(i for i, entry in enumerate(log) if entry == ("read", reader))
    record = log.index(("record", reader), last_read)
    return ("wait", writer, reader) in log[record:]


def read_in_first_rank(rank: Communicator, array: Any) -> None:
    def read(arrays: list[Any]) -> None:
        fake_cupy.concatenate(arrays)

    call_in_first_rank(rank, read, array, [GPU, GPU], "reading")


CALLS: dict[str, tuple[Callable[[Communicator, Any], Any], list[tuple[int, int]]]] = {
    # The call, and which rank's writes must come after which rank's reads.
    "all_reduce": (lambda rank, array: rank.all_reduce(array), [(0, 1), (1, 0)]),
    "all_gather_slices": (
        lambda rank, array: rank.all_gather_slices(
            IndexedSlices(array, fake_cupy.asarray(np.array([0, 1])))
        ),
        [(0, 1), (1, 0)],
    ),
    "broadcast": (lambda rank, array: rank.broadcast(array, 1), [(1, 0)]),
    "call_in_first_rank": (read_in_first_rank, [(1, 0)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_writes_after_a_collective_wait_for_the_reads_in_it(log: Log, name: str) -> None:
    call, ordered = CALLS[name]
    streams = [fake_cupy.cuda.Stream() for _ in range(2)]
    ready = threading.Barrier(2, timeout=20)

    def run(rank: Communicator) -> None:
        with fake_cupy.cuda.Device(0), streams[rank.rank]:
            array = fake_cupy.ones((2, 3), np.float32)
            ready.wait()
            log.clear()
            ready.wait()
            call(rank, array)

    ThreadGroup(2).run(run)
    for writer, reader in ordered:
        assert waits_for_reads(log, streams[writer].ptr, streams[reader].ptr), log
