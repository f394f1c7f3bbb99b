"""A rule as it is written, for small work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpuopt.backends.backend import Scalars
from gpuopt.rules.update_rule import UpdateRule

Chunk = np.ndarray[Any, Any]


class PlainRule:
    """A rule as it is written: each operation takes memory for its result."""

    scratch_dtypes: tuple[np.dtype[Any], ...] = ()
    update_chunks = None
    scalars_address = 0
    # The temporaries stay in the second-level cache. Twice as much costs four times the time: each
    # temporary is then fresh memory from the operating system.
    most_elements = 32 * 1024

    def __init__(self, rule: UpdateRule, scalars: Scalars) -> None:
        self._rule, self._scalars = rule, scalars

    def apply(self, written: Sequence[Chunk], grad: Chunk | None, scratch: Sequence[Chunk]) -> None:
        self._rule.apply(written[0], grad, *written[1:], **self._scalars)
