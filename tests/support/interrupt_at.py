"""Exceptions at chosen moments of a call, as from a signal handler."""

from __future__ import annotations

import sys
from typing import Any


class Interrupt(BaseException):
    pass


class InterruptAt:
    """Raises in this thread as a signal handler does: at a call's beginning, or after a built-in.

    Counts those moments; `moment` says at which.
    """

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __enter__(self) -> None:
        sys.setprofile(self)

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code is not InterruptAt.__exit__.__code__:
            self.left -= 1
            if self.left == 0:
                raise Interrupt
