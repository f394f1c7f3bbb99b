"""A launch that fails, as for want of memory on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuopt.backends.cuda.launcher import Launch


@contextmanager
def failing_launch(number: int, error: type[BaseException]) -> Iterator[None]:
    """Has one of the launches inside, counted from 0, raise an error."""
    start, numbers = Launch.start, itertools.count()

    def start_or_fail(launch: Launch) -> None:
        if next(numbers) == number:
            raise error
        start(launch)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Launch, "start", start_or_fail)
        yield
