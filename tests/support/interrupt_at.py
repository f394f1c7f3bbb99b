"""Exceptions at chosen moments of a call, as from a signal handler."""

from __future__ import annotations

import itertools
import logging
import sys
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
