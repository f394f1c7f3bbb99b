"""Copies of rows in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any

from gpuopt.backends.backend import RowCopy
from gpuopt.interrupts import at_once


def copy_rows(copies: Sequence[RowCopy]) -> None:
    """Does what `Backend.copy_rows` does."""
    at_once(list(map(_prepared, copies)))


def _prepared(copy: RowCopy) -> Callable[[], Any]:
    target, source, from_rows, to_rows = copy
    if to_rows is None and from_rows is not None:
        # "clip" writes to the target itself, and "raise" to a copy of it.
        return partial(source.take, from_rows, 0, target, "clip")
    rows = ... if to_rows is None else to_rows
    return partial(setitem, target, rows, source if from_rows is None else source[from_rows])
