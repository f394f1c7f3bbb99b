"""Tables and numbers that may be behind: who reads or writes one brings it up to date."""

from __future__ import annotations

from typing import Any, Protocol


class RowsBehind(Protocol):
    """Knows which rows of a table have missed steps, and what these would have done.

    Or which steps a GPU has left out, that the host has counted: of such numbers, `rows` is None.
    """

    def bring_up(self, rows: Any = None) -> None:
        """Brings rows up to date, and the same rows of the table's slots.

        Args:
            rows: Integers within range, of any shape; they may repeat. None for all rows.
        """
