"""Which of many alike cases run in each change; GPUOPT_FULL runs all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

FULL = bool(os.environ.get("GPUOPT_FULL"))


def one_of_each(firsts: Iterable[Any], seconds: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs each first with one second after the other, by turns; with GPUOPT_FULL, with all."""
    return [
        (first, second)
        for i, first in enumerate(firsts)
        for second in (seconds if FULL else [seconds[i % len(seconds)]])
    ]
