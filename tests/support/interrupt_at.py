"""Exceptions at chosen moments of a call, as from a signal handler."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any


class Interrupt(BaseException):
    pass


class InterruptAt:
    """Raises in this thread as a signal handler does: at a call's beginning, or after a built-in.

    Counts those moments; `moment` says at which. Those inside of `left_out`, a module, are not
    counted, nor those of files whose paths have none of the names in `inside`. Nor are those inside
    of `logging`, which an exception leaves with its lock taken.
    """

    def __init__(
        self, moment: int, left_out: ModuleType | None = None, inside: Sequence[str] = ("",)
    ) -> None:
        self.moment = self.left = moment
        self._left_out = left_out and left_out.__file__
        self._inside = inside

    def __enter__(self) -> InterruptAt:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if code is InterruptAt.__exit__.__code__:
            return
        if code.co_filename in (self._left_out, logging.__file__):
            return
        if not any(name in code.co_filename for name in self._inside):
            return
        if event in ("call", "c_return"):
            self.left -= 1
            if self.left == 0:
                raise Interrupt


def each_moment(
    inside: Sequence[str] = ("",), *, least: int, stride: int = 1
) -> Iterator[InterruptAt]:
    """Interrupts at one moment after the other, up to one that does not come.

    Args:
        inside: See `InterruptAt`.
        least: So many moments come at least.
        stride: From one to the next.
    """
    for moment in itertools.count(1, stride):
        interrupt = InterruptAt(moment, inside=inside)
        yield interrupt
        if interrupt.left > 0:
            break
    assert moment > least


class HandleAt:
    """Calls a signal handler at a moment, counted as `InterruptAt` does."""

    def __init__(self, moment: int, handler: Callable[[], Any], inside: Sequence[str]) -> None:
        self._interrupt = InterruptAt(moment, inside=inside)
        self._handler = handler

    def __enter__(self) -> HandleAt:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def __call__(self, *event: Any) -> None:
        try:
            self._interrupt(*event)
        except Interrupt:
            sys.setprofile(None)
            self._handler()

    @property
    def is_over(self) -> bool:
        """Whether the moment did not come."""
        return self._interrupt.left > 0


class AtRandomMoments:
    """Raises in the main thread by a timer's signal, at moments of calls of equal chances.

    Attributes:
        came: Whether the signal came in the last call.
        last: The last error, as an interactive Python keeps it, with all that its frames refer to.
    """

    # How long a call takes is found by one that is not interrupted.
    MEASURED_EVERY = 10

    def __init__(self, seed: int, kind: type[BaseException] = Interrupt) -> None:
        self._random, self._kind = random.Random(seed), kind
        self._longest_s: dict[str, float] = {}
        self._num_calls = Counter[str]()
        self.came = self._is_wanted = False
        self.last: BaseException | None = None
        signal.signal(signal.SIGALRM, self._handle)

    def interrupt(self) -> None:
        raise self._kind

    def _handle(self, *_: Any) -> None:
        if self._is_wanted:
            self._is_wanted, self.came = False, True
            self.interrupt()

    def during(self, name: str, call: Callable[[], Any]) -> bool:
        """Makes a call; whether it was interrupted."""
        number, self.came = self._num_calls[name], False
        self._num_calls[name] += 1
        if number % self.MEASURED_EVERY == 0:
            began = time.perf_counter()
            call()
            self._longest_s[name] = time.perf_counter() - began
            return False
        self._is_wanted = True
        try:
            try:
                delay = self._random.uniform(1e-6, 1.1 * self._longest_s[name])
                signal.setitimer(signal.ITIMER_REAL, delay)
                call()
            finally:
                self._is_wanted = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except self._kind as error:
            self.last = error
            return True
        return False
