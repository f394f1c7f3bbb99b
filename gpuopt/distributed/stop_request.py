"""StopRequest: all ranks stop after the same step when a signal asks one of them to."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from gpuopt.distributed.communicator import Communicator


class StopRequest:
    """Notes signals that ask this process to end, so that it can save first.

    Schedulers send SIGTERM some time before they kill: to one rank, or to all, but not to all in
    the same step.

        with gpuopt.distributed.StopRequest() as request:
            while not request.is_agreed(communicator):
                train_step()

    `SyncReplicasOptimizer.run` takes a request, and ends training when a signal comes.

    Attributes:
        has_come: Whether a signal has come to this process.
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM,)) -> None:
        """Says which signals count; they do from `__enter__` to `__exit__`.

        Args:
            signals: Numbers of signals.
        """
        self._signals = signals
        self._outer: list[Callable[[int, FrameType | None], Any] | int | None] = []
        self.has_come = False

    def __enter__(self) -> StopRequest:
        """Begins to note signals; only Python's main thread can.

        Raises:
            ValueError: this is another thread.
        """
        self._outer = [signal.signal(number, self._note) for number in self._signals]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, outer in zip(self._signals, self._outer, strict=True):
            signal.signal(number, outer)

    def is_agreed(self, communicator: Communicator) -> bool:
        """Returns whether a signal has come to any rank; all ranks call this, and get the same."""
        mine = np.array([self.has_come], np.int8)
        return bool(communicator.all_reduce(mine, "max")[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
