"""The interface between the backend and what runs its kernels: a GPU, or the tests' emulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from gpuopt.backends import launch_observer
from gpuopt.backends.cuda.kernel import WORD, Kernel
from gpuopt.backends.cuda.parameters import Memory
from gpuopt.backends.memory_owner import Owner
from gpuopt.locks import Waiting


class Event(Protocol):
    """A point in a stream's work.

    Attributes:
        done: Whether all work before this point is done; raises an error of CUDA that has ended it.
    """

    done: bool


class Download:
    """A copy to the host that may still be in flight.

    Attributes:
        values: The copy, in host memory; must not be read before it is done, nor after this object
            is gone.
        event: Recorded at the copy's end.
        is_recorded: Whether it has been: not if the call that began the copy was interrupted.
    """

    __slots__ = ("event", "is_recorded", "values")

    def __init__(self, values: np.ndarray[Any, Any], event: Event) -> None:
        self.values = values
        self.event = event
        self.is_recorded = False

    @property
    def is_done(self) -> bool:
        return self.event.done

    def wait(self, what: str) -> None:
        """Makes the host wait for the copy; see `wait_for_event`."""
        wait_for_event(self.event, what)


def wait_for_event(event: Event, what: str) -> None:
    """Makes the host wait until all work before an event is done.

    The event's own `synchronize` would keep Ctrl-C waiting, and end at no deadline.

    Args:
        event: Recorded by `Launcher.record`.
        what: A description of the awaited work, for the error.

    Raises:
        DeadlineExceededError: the work does not end.
        Exception: CUDA's, at once, if the work has failed.
    """
    if event.done:
        return
    observer = launch_observer.this_thread.observer
    if observer is not None:
        observer.note_wait()
    waiting = Waiting()
    # As CUDA does by default, for work of a millisecond: a sleep would be as long as the work.
    while not event.done and waiting.is_short:
        pass
    while not event.done:
        waiting.pause(lambda: what)


class Launch:
    """A kernel with a launch shape and arguments, which are packed once for many starts.

    A start copies them: new values may be written while an earlier one is still queued.

    Attributes:
        kernel: The kernel.
        address: Where the pointers to the arguments begin: `kernelParams` of `cuLaunchKernel`.
    """

    __slots__ = (
        "_bytes",
        "_given",
        "_launcher",
        "_memory",
        "_start",
        "_words",
        "address",
        "kernel",
    )

    def __init__(
        self,
        kernel: Kernel,
        given: Mapping[str, Any],
        memory: Memory,
        load: Callable[[], Callable[[int], None]],
        launcher: Launcher,
    ) -> None:
        """Checks and packs the arguments.

        Args:
            kernel: The kernel.
            given: By parameter: for a pointer an array, or, if it is optional, None or nothing; a
                number; for a struct a NamedTuple of these.
            memory: Finds arrays.
            load: Called once all types are checked: compiles the kernel. Returns what starts it on
                the current stream, and takes the arguments' address.
            launcher: Whose stream that is.

        Raises:
            TypeError: an argument is missing or unknown, or is not of the parameter's type.
        """
        kernel.check_names(given)
        self.kernel = kernel
        self._memory = memory
        # Arrays are kept alive.
        self._given: dict[str, Any] = {}
        self._words = np.zeros(kernel.words_of_arguments, np.uint64)
        self._bytes = self._words.data.cast("B")
        self.address: int = self._words.ctypes.data
        offsets = [place.offset for place in kernel.places.values()]
        self._words[: len(offsets)] = np.array(offsets, np.uint64) + np.uint64(self.address)
        self.replace(**given)
        self._start = load()
        self._launcher = launcher

    def replace(self, **given: Any) -> None:
        """Checks and packs new values of some arguments; those that are the same are left.

        Raises:
            TypeError: an argument is not of the parameter's type.
        """
        places, memory, last = self.kernel.places, self._memory, self._given
        for name, value in given.items():
            if name in last and last[name] is value:
                continue
            parameter, pack_into, offset = places[name]
            try:
                values = parameter.to_values(value, memory)
            except TypeError as error:
                raise TypeError(f"{self.kernel.expression}: {name}{error}") from None
            pack_into(self._bytes, offset, *values)
            last[name] = value

    def forget(self, name: str) -> None:
        """Lets an array go, and leaves a null pointer to be replaced before the next launch."""
        self._given.pop(name, None)
        self._words[self.kernel.places[name].offset // WORD] = 0

    def start(self) -> None:
        """Starts the kernel on the device's current stream."""
        observer = launch_observer.this_thread.observer
        if observer is not None:
            self._start_observed(observer)
            return
        self._start(self.address)

    def _start_observed(self, observer: launch_observer.LaunchObserver) -> None:
        launcher, name = self._launcher, self.kernel.name
        with launcher.profiling_range(name):
            read_ms = launcher.timed(lambda: self._start(self.address))
        observer.note_launch(launcher.name, name, read_ms)


class Launcher(Protocol):
    """Runs kernels on one device. Methods that work on it are called inside `device()`.

    Attributes:
        xp: The module of the device's arrays: CuPy, or one like it.
        name: The device's, as "gpu:0".
        num_multiprocessors: How many the device has; each runs at least one block at a time.
        cache_bytes: Of the largest cache.
    """

    xp: Any
    name: str
    num_multiprocessors: int
    cache_bytes: int

    def device(self) -> AbstractContextManager[Any]:
        """Makes the device this thread's current one."""

    def profiling_range(self, name: str) -> AbstractContextManager[Any]:
        """Names the work inside for profilers."""

    def bind(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> Launch:
        """Prepares launches of a kernel.

        Args:
            kernel: The kernel.
            num_blocks: At least 1.
            num_threads: Of each block; a multiple of 32.
            **arguments: One for each parameter; see `Launch`.

        Raises:
            TypeError: an argument is missing or unknown, or is not of the parameter's type.
        """

    def launch(
        self, kernel: Kernel, num_blocks: int, num_threads: int, /, **arguments: Any
    ) -> None:
        """Starts a kernel on the device's current stream; see `bind`."""

    def timed(self, start: Callable[[], object]) -> Callable[[], float]:
        """Calls `start`, which enqueues work on the device's current stream.

        Returns:
            What waits for the end of the work, and returns how many milliseconds it took.
        """

    def address(self, array: Any) -> int:
        """Returns where an array's first element is."""

    def unowned(self, array: Any) -> Any:
        """Returns an array of the same layout on the same memory, which it does not keep alive."""

    def memory_owner(self, array: Any) -> Owner:
        """Finds who owns an array's memory; see `Owner`."""

    def owns(self, arrays: Sequence[Any]) -> bool:
        """Whether all are in the device's memory."""

    def addresses(self, arrays: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Returns the addresses of many arrays, int64."""

    def strided(self, arrays: Sequence[Any]) -> list[int]:
        """Returns the positions of arrays that are not contiguous in C's order."""

    def upload(self, target: Any, source: np.ndarray[Any, Any]) -> None:
        """Copies host memory to a contiguous device array of the same size and type.

        The copy is in order with launches; `source` may be overwritten as soon as this returns.
        """

    def download(self, source: Any) -> Download:
        """Begins to copy a contiguous device array to page-locked memory, in order with launches.

        A copy of more than a few bytes must be kept until it is done: its memory is the pool's.
        """

    def copy_of_peer(self, array: Any) -> Any:
        """Returns a copy of another device's array, in order with both current streams.

        The array's memory may belong to a third stream: the caller keeps it until the copy is done.
        """

    def stream(self) -> Hashable:
        """Returns the current stream: work on one stream is done in order."""

    def is_default_stream(self) -> bool:
        """Whether the current stream is the one that a program has if it makes none."""

    def is_capturing(self) -> bool:
        """Whether the device's current stream is being captured into a CUDA graph.

        May be called outside of `device()`.
        """

    def record(self, event: Any = None) -> Event:
        """Marks the present end of the current stream's work.

        Args:
            event: The event to record there; by default, a new one.
        """

    def wait(self, event: Event) -> None:
        """Makes later work on the current stream wait for an event of any stream."""


def to_device(launcher: Launcher, host: np.ndarray[Any, Any]) -> Any:
    """Returns a new array on the device with the values of a contiguous one; see `upload`."""
    array = launcher.xp.empty(host.shape, dtype=host.dtype)
    launcher.upload(array, host)
    return array


class LaunchSequence:
    """Prepared launches, and the arguments that differ from one start to the next."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        # By the names of their parameters.
        self._takers: dict[str, list[Launch]] = {}
        # (a launch that reads the gradient's rows, the name of its parameter)
        self._readers: list[tuple[Launch, str]] = []
        self._last: dict[str, Any] = {}

    def add(self, launch: Launch, rows: str | None = None) -> None:
        """Adds a launch after the others, with the arguments of its first start.

        `rows` is the name of the parameter that takes the gradient's rows, if there is one.
        """
        self._launches.append(launch)
        for name in launch.kernel.parameters:
            self._takers.setdefault(name, []).append(launch)
        if rows is not None:
            self._readers.append((launch, rows))

    def start(self, rows: Any = None, **arguments: Any) -> None:
        """Starts all launches on the current stream, with new values of some arguments.

        The gradient's rows are not kept.
        """
        for name, given in arguments.items():
            before = self._last.get(name, self)
            if before is not given and not (isinstance(given, tuple) and before == given):
                for launch in self._takers.get(name, ()):
                    launch.replace(**{name: given})
                self._last[name] = given
        for launch, parameter in self._readers:
            launch.replace(**{parameter: rows})
        try:
            for launch in self._launches:
                launch.start()
        finally:
            for launch, parameter in self._readers:
                launch.forget(parameter)
