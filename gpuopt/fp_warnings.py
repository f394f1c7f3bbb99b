"""Arithmetic without numpy's warnings: NaN and infinity are results, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")


def ignore_fp_warnings(compute: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function while numpy ignores floating-point errors, and returns its result.

    What numpy does about them is a context variable. It is set in a copy of the context, for there
    it goes with the call, however that ends: Ctrl-C at the end of `with np.errstate(...)` would
    leave the user's warnings off.
    """
    context = copy_context()
    context.run(np.errstate(all="ignore").__enter__)
    return context.run(compute, *arguments)
