"""The numbers of elements in their variable, computed where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Numbers:
    """The numbers of consecutive elements, or of rows.

    Attributes:
        first: The place of the first element in the variable; of row 0, if there are rows.
        size: The number of consecutive elements; the row width, if there are rows.
        rows: The rows; None for consecutive elements.
        of_variable: The number of the variable's first element; see `Target.first_number`.
    """

    first: int
    size: int
    rows: Array | None = None
    of_variable: int = 0

    def __call__(self) -> Array:
        """Returns the numbers for stages of the gradient: uint64, flat."""
        numbers: Array = self.within() + np.uint64(self.of_variable)
        return numbers

    def within(self) -> Array:
        """Returns the numbers for rounding, which begin at 0 in each variable."""
        numbers: Array = np.arange(self.first, self.first + self.size, dtype=np.uint64)
        if self.rows is not None:
            firsts = self.rows.astype(np.uint64)[:, np.newaxis] * np.uint64(self.size)
            numbers = (firsts + numbers).reshape(-1)
        return numbers
