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
        of_variable: The number from which on those of the variable are counted.
    """

    first: int
    size: int
    rows: Array | None = None
    of_variable: int = 0

    def __call__(self) -> Array:
        """Returns them, uint64, flat: as stages of the gradient take them."""
        numbers: Array = self.within() + np.uint64(self.of_variable)
        return numbers

    def within(self) -> Array:
        """Returns them as if the variable began at 0: as rounding takes them."""
        numbers: Array = np.arange(self.first, self.first + self.size, dtype=np.uint64)
        if self.rows is not None:
            firsts = self.rows.astype(np.uint64)[:, np.newaxis] * np.uint64(self.size)
            numbers = (firsts + numbers).reshape(-1)
        return numbers
