"""The numbers of elements in their variable, made where something takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Numbers:
    """Those of elements that follow each other, or of rows.

    Attributes:
        first: The number of the first element; of row 0, if there are rows.
        size: How many elements follow each other: those of a row, if there are rows.
        rows: The rows; None if there are none.
    """

    first: int
    size: int
    rows: Array | None = None

    def __call__(self) -> Array:
        """Returns them, uint64, flat."""
        numbers: Array = np.arange(self.first, self.first + self.size, dtype=np.uint64)
        if self.rows is not None:
            firsts = self.rows.astype(np.uint64)[:, np.newaxis] * np.uint64(self.size)
            numbers = (firsts + numbers).reshape(-1)
        return numbers
