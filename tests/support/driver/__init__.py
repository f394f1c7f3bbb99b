"""The stub driver: CuPy's own wheel runs on it without a GPU, on any Linux with g++ on x86-64.

See docs/architecture.md, "The stub driver".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from driver.native_library import library

POLICIES = ("immediate", "oldest", "newest", "random", "nothing")


def is_here() -> bool:
    """Says whether this process runs on the driver."""
    return os.environ.get("GPUOPT_DRIVER") == "1"


def set_policy(policy: str, seed: int = 0) -> None:
    """Chooses how streams run, after everything that is queued has been run.

    Args:
        policy: "immediate" runs each operation at once. The others run nothing before the host
            waits, and then, of the operations that CUDA allows to run next, the "oldest", the
            "newest" or a "random" one. "nothing" is "immediate" without kernels, to time the host.
        seed: For "random".
    """
    library().driver_set_policy(POLICIES.index(policy), seed)


@contextmanager
def schedule(policy: str, seed: int = 0) -> Iterator[None]:
    """Has streams run by another policy; see `set_policy`."""
    set_policy(policy, seed)
    try:
        yield
    finally:
        set_policy(*policy_of_process())


def policy_of_process() -> tuple[str, int]:
    policy, _, seed = os.environ.get("GPUOPT_DRIVER_STREAMS", "oldest").partition(":")
    return policy, int(seed or 0)


def synchronize() -> None:
    """Runs everything that is queued."""
    library().driver_wait_for_everything()


def counts() -> dict[str, int]:
    """Returns how often each function of CUDA was called, and how much was copied."""
    lines = library().driver_counts().decode().splitlines()
    return {name: int(number) for name, _, number in (line.rpartition(" ") for line in lines)}


def take_reports() -> list[str]:
    """Runs everything, looks at all memory, and returns the defects found since the last call."""
    synchronize()
    library().driver_check_memory()
    return library().driver_take_reports().decode().splitlines()


def repair() -> None:
    """Makes devices usable again on which a kernel has failed; a real one never is."""
    library().driver_repair_devices()


class Mark(NamedTuple):
    """The end of what a stream has been given so far."""

    stream: int
    number: int


def mark(device: int, stream: int) -> Mark:
    """Marks the end of a stream's work, by the stream's device and handle.

    Raises:
        ValueError: the device has no such stream, or it was destroyed.
    """
    number_of_stream, number = ctypes.c_uint64(), ctypes.c_uint64()
    results = map(ctypes.byref, (number_of_stream, number))
    library().driver_mark(device, ctypes.c_void_p(stream), *results)
    if not number_of_stream.value:
        raise ValueError(f"gpu:{device} has no stream {stream:#x}")
    return Mark(number_of_stream.value, number.value)


def precedes(done: Mark, device: int, stream: int) -> bool:
    """Says whether a program may rely on `done` before whatever it gives the stream next.

    Events, the legacy default stream's rules and waits of the host count; luck does not.
    """
    arguments = ctypes.c_uint64(done.stream), ctypes.c_uint64(done.number)
    return bool(library().driver_precedes(*arguments, device, ctypes.c_void_p(stream)))


def num_remembered() -> int:
    """Counts streams and the entries of vector clocks, on which the time of each call depends."""
    return library().driver_num_remembered()  # type: ignore[no-any-return]


class Launch(NamedTuple):
    """A kernel, copy or fill.

    Attributes:
        kind: "kernel", "fill", "host to device", "device to host" or "device to device".
        name: The kernel's, in C++.
        num_bytes: That are copied or filled.
        stream: Its handle.
        arguments: The bytes of each of the kernel's.
    """

    kind: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    num_bytes: int
    device: int
    stream: int
    arguments: tuple[bytes, ...]


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Lists what is launched inside, in the order of the calls; complete at the end."""
    launches: list[Launch] = []
    library().driver_record_launches(1)
    try:
        yield launches
    finally:
        library().driver_record_launches(0)
        for line in library().driver_launches().decode().splitlines():
            kind, *numbers, arguments, name = line.split("\t")
            n = list(map(int, numbers))
            given = tuple(map(bytes.fromhex, arguments.split()))
            launches.append(Launch(kind, name, tuple(n[:3]), tuple(n[3:6]), *n[6:], given))  # type: ignore[arg-type]
